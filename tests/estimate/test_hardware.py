"""GPUs are found under the names that people and drivers use, and under no others."""

import re

import pytest

from harness.estimate.hardware import GPUS, find_gpu, half_precision, known_gpu
from tests.real_runs import REPOSITORY
from tests.tables import beside


def test_a_key_finds_its_gpu_whose_figures_have_a_source() -> None:
    for key, gpu in GPUS.items():
        assert find_gpu(key) is find_gpu(gpu.name.split(",")[0]) is gpu
        assert "datasheet" in gpu.source or "whitepaper" in gpu.source


NAMES = beside(__file__, "hardware.toml")


@pytest.mark.parametrize(("name", "key"), NAMES["found"].items())
def test_names_of_drivers_and_people(name: str, key: str) -> None:
    assert find_gpu(name) is GPUS[key]


@pytest.mark.parametrize(("name", "keys"), NAMES["refused"].items())
def test_other_products_are_refused_with_the_keys(name: str, keys: str) -> None:
    with pytest.raises(ValueError, match=rf"unknown GPU '{name}': it must be one of .*{keys}"):
        find_gpu(name)


def test_names_that_are_listed_or_documented_are_known() -> None:
    with pytest.raises(ValueError, match="unknown GPU") as caught:
        find_gpu("nothing")
    listed = str(caught.value).partition("one of ")[2].split(", ")
    assert [find_gpu(name).key for name in listed] == [*GPUS]
    pages = [REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")]
    texts = (path.read_text() for path in pages)
    assert {name for text in texts for name in re.findall(r"--gpu ([\w-]+)", text)} <= {*listed}


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
    assert half_precision("an unheard-of card") == "bf16"
