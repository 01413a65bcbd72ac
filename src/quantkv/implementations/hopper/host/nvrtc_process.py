"""CUDA C++ to a cubin, by NVRTC. As a script: one program as JSON on standard input, its cubin on standard output.

The script imports neither quantkv nor torch, so it begins to compile after a quarter of a second.
"""

import json
import sys


def compiled(text: str, arch: str, folders: list[str]) -> bytes:
    """The cubin of a program for `arch`; folders: of what it includes. cuda.core's NVRTCError where it does not compile."""
    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(std="c++17", arch=arch, include_path=folders, device_as_default_execution_space=True)
    return bytes(Program(text, "c++", options).compile("cubin").code)


def main() -> int:
    """Compile what standard input says, unless another NVRTC is found than that of the process which asks."""
    given = json.load(sys.stdin)
    sys.path[:] = given.pop("path")
    from cuda.bindings import nvrtc

    if list(nvrtc.nvrtcVersion()[1:]) != given.pop("version"):
        return 1
    sys.stdout.buffer.write(compiled(**given))
    return 0


if __name__ == "__main__":
    sys.exit(main())
