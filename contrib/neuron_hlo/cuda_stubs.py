# SPDX-License-Identifier: Apache-2.0
"""Empty stand-ins for the big CUDA libraries that PyPI's torch is linked with: `python cuda_stubs.py SITE_PACKAGES`.

They are 2 GB and more, and no CPU machine ever calls them; `import torch` only wants their names. Each stub has the
symbols that torch's own libraries ask of it, every one a function that returns 1. Needs gcc, nm and readelf.
"""

import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

# soname -> how the names of its symbols begin
BIG = {
    "libcublasLt.so.12": "cublasLt",
    "libcublas.so.12": "cublas",
    "libcudnn.so.9": "cudnn",
    "libcufft.so.11": "cufft",
    "libcurand.so.10": "curand",
    "libcusparseLt.so.0": "cusparseLt",
    "libcusparse.so.12": "cusparse",
    "libnccl.so.2": "nccl",
    "libnvshmem_host.so.3": "nvshmem",
    "libcusolver.so.11": "cusolver",
}
TORCH = (
    "torch_cpu",
    "torch_cuda",
    "torch_python",
    "torch_nvshmem",
    "c10_cuda",
    "c10",
    "torch_cuda_linalg",
    "shm",
    "torch",
)


def output_of(*command) -> str:
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True).stdout


def symbols(library: Path, which: str) -> set[str]:
    """Dynamic symbols, "name" or "name@version"."""
    return {line.split()[-1].replace("@@", "@") for line in output_of("nm", "-D", which, library).splitlines()}


def sonames_of_versions(library: Path) -> dict[str, str]:
    found, soname = {}, ""
    for line in output_of("readelf", "-V", library).splitlines():
        if match := re.search(r"File: (\S+)", line):
            soname = match[1]
        if match := re.search(r"Name: (\S+)", line):
            found[match[1]] = soname
    return found


def build(lib: Path, soname: str, needed: set[str]) -> None:
    versions = defaultdict(list)
    for symbol in sorted(needed):
        name, _, version = symbol.partition("@")
        if version:
            versions[version].append(name)
    names = sorted({symbol.partition("@")[0] for symbol in needed})
    with tempfile.TemporaryDirectory() as folder:
        source, script = Path(folder, "stub.c"), Path(folder, "stub.map")
        source.write_text("".join(f"int {name}(void) {{ return 1; }}\n" for name in names) or "int stub;\n")
        script.write_text("".join(f"{v} {{ global: {'; '.join(names)}; }};\n" for v, names in versions.items()))
        options = [f"-Wl,--version-script={script}"] if versions else []
        options += [f"-Wl,-soname,{soname}", "-o", lib / soname, source]
        output_of("gcc", "-shared", "-fPIC", "-w", "-fno-builtin", *options)


def main(site_packages: Path) -> None:
    lib = site_packages / "torch" / "lib"
    libraries = [path for name in TORCH if (path := lib / f"lib{name}.so").exists()]
    there = set().union(
        *(
            {symbol.partition("@")[0] for symbol in symbols(library, "--defined-only")}
            for library in [*libraries, *site_packages.glob("nvidia/*/lib/*.so*")]
        )
    )
    needed = defaultdict(set)
    for library in libraries:
        sonames = sonames_of_versions(library)
        for symbol in symbols(library, "--undefined-only"):
            name, _, version = symbol.partition("@")
            if name in there:
                continue
            if version:
                needed[sonames.get(version)].add(symbol)
            else:  # the longest beginning: cublasLt before cublas
                begins = [
                    n for n, start in BIG.items() if name.startswith(start) or start == "nvshmem" and start in name
                ]
                needed[max(begins, key=lambda soname: len(BIG[soname]), default=None)].add(symbol)
    for soname in BIG:
        if not (lib / soname).exists():
            build(lib, soname, needed[soname])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
