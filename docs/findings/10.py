import os, pathlib, subprocess, sys, tempfile

folder = tempfile.mkdtemp()
env = {**os.environ, "TORCH_EXTENSIONS_DIR": folder}
build = [sys.executable, "-c", """
from torch.utils.cpp_extension import load_inline
load_inline("one", "int one() { return 1; }", functions=["one"])
"""]
pathlib.Path(folder, "one").mkdir()
pathlib.Path(folder, "one", "lock").touch()  # what a build that was killed leaves behind
try:
    done = subprocess.run(build, env=env, capture_output=True, text=True, timeout=30)
    print("ended", done.returncode)
except subprocess.TimeoutExpired as waited:
    print("still waiting after 30 s; it said:", waited.stdout, waited.stderr)
