"""GPUs are found under the names that people and drivers use, and under no others."""

import pytest

from harness.estimate.hardware import GPUS, find_gpu, known_gpu


def test_a_key_finds_its_gpu_whose_figures_have_a_source() -> None:
    for key, gpu in GPUS.items():
        assert find_gpu(key) is find_gpu(gpu.name.split(",")[0]) is gpu
        assert "datasheet" in gpu.source or "whitepaper" in gpu.source


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("Tesla V100-SXM2-32GB", "v100-32"),
        ("Tesla V100-PCIE-16GB", "v100-16"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100 80GB PCIe", "a100-80"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("h100-80", "h100-sxm"),
        ("H100", "h100-sxm"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("rtx4090", "rtx-4090"),
        ("AMD Instinct MI250X", "mi250x"),
        ("mi300x", "mi300x"),
        ("Tesla T4", "t4"),
        ("NVIDIA A30", "a30"),
        ("NVIDIA A40", "a40"),
        ("NVIDIA RTX A6000", "rtx-a6000"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("NVIDIA A800-SXM4-80GB", "a800"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA H800", "h800"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("GH200 120GB", "gh200"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40", "l40"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 5090", "rtx-5090"),
    ],
)
def test_names_of_drivers_and_people(name: str, key: str) -> None:
    assert find_gpu(name) is GPUS[key]


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("a100", "a100-40, a100-80"),
        ("NVIDIA H800 PCIe", "h100-sxm, h100-pcie"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "rtx-4090"),
        ("NVIDIA A10G", "a10"),
        ("NVIDIA GH200 144G HBM3e", "gh200"),
        ("NVIDIA RTX 6000", "rtx-6000-ada"),
        ("NVIDIA A800 40GB Active", "a800"),
        ("Voodoo 2", "t4, v100-16, .*, mi300x"),
    ],
)
def test_other_products_are_refused_with_the_keys(name: str, keys: str) -> None:
    with pytest.raises(ValueError, match=rf"unknown GPU '{name}': it must be one of .*{keys}"):
        find_gpu(name)


def test_a_slice_of_a_gpu_has_no_figures() -> None:
    name = "NVIDIA H100 80GB HBM3 MIG 1g.10gb"
    with pytest.raises(ValueError, match="it is a MIG slice of unknown size"):
        find_gpu(name)
    assert known_gpu(name) is None


def test_peaks_by_precision() -> None:
    h100, v100 = GPUS["h100-sxm"], GPUS["v100-32"]
    assert (h100.peak_tflops("bf16"), h100.peak_tflops("fp32")) == (989.4, 67.0)
    assert h100.bf16_tflops
    assert v100.bf16_tflops is None
    assert v100.peak_tflops("fp16") == 125.0
    assert v100.peak_tflops("bf16") == v100.fp32_tflops
