# Copyright 2026 The duomoe authors
# SPDX-License-Identifier: Apache-2.0
"""Builds the core and the two bindings with Ninja, and packs them beside the Python packages.

One shared library (`libduomoe`, from common/csrc) and up to two bindings that link to it; a
binding is built if its framework can be imported. Environment variables:

DUOMOE_CUDA        0 or 1 leaves the CUDA kernels out or insists on them (default: if nvcc is found)
DUOMOE_CUDA_ARCHS  compute capabilities, as "90" (default) or "80;90"; PTX of the last one is added
DUOMOE_REQUIRE     frameworks whose binding must be built, as "jax,torch" (default: none)
CXX, NVCC          compilers
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
CORE = ROOT / "common" / "csrc"
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

CXX_FLAGS = (
    "-std=c++20 -O3 -fPIC -fvisibility=hidden -ffp-contract=off -fno-math-errno"
    " -fno-trapping-math -Wall -Wextra"
)
# One source per instruction set; each holds all inner loops of the CPU kernels.
ISA_FLAGS = {
    "simd_avx2.cc": "-mavx2 -mfma",
    "simd_avx512.cc": "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx2 -mfma"
    " -mprefer-vector-width=512",
}
# fmad off: a multiplication and an addition stay two operations, as on the CPU.
NVCC_FLAGS = (
    "-std=c++20 -O3 -fmad=false --expt-relaxed-constexpr -Xcompiler -fPIC,-fvisibility=hidden"
)


def find_nvcc() -> str | None:
    """The CUDA compiler, or None where CUDA is off or not there."""
    wanted = os.environ.get("DUOMOE_CUDA", "auto")
    nvcc = os.environ.get("NVCC") or shutil.which("nvcc")
    if wanted not in ("auto", "0", "1"):
        raise SystemExit(f"DUOMOE_CUDA must be 0 or 1, got {wanted!r}")
    if wanted == "0":
        return None
    if wanted == "1" and nvcc is None:
        raise SystemExit("DUOMOE_CUDA=1 needs nvcc; put it on PATH or set NVCC")
    return nvcc


def cuda_library_dir(nvcc: str) -> Path:
    """The folder of libcudart_static.a, from what nvcc says of itself."""
    dry = subprocess.run([nvcc, "--dryrun", "x.cu"], capture_output=True, text=True).stderr
    top = next(line.split("=", 1)[1] for line in dry.splitlines() if "TOP=" in line)
    for name in ("lib64", "lib", "targets/x86_64-linux/lib"):
        if (Path(top.strip()) / name / "libcudart_static.a").exists():
            return Path(top.strip()).resolve() / name
    raise SystemExit(f"libcudart_static.a is not below {top}")


def has(framework: str) -> bool:
    """Whether a framework is installed, and an error if it is required and missing."""
    found = importlib.util.find_spec(framework) is not None
    if not found and framework in os.environ.get("DUOMOE_REQUIRE", "").split(","):
        raise SystemExit(
            f"DUOMOE_REQUIRE asks for the {framework} binding, but {framework} is not installed"
        )
    return found


def build_native(build_dir: Path) -> dict[str, Path]:
    """Write build.ninja, run it, and return {path inside the packages: built file}."""
    from ninja import BIN_DIR, ninja_syntax

    build_dir.mkdir(parents=True, exist_ok=True)
    nvcc = find_nvcc()
    print(f"duomoe: CUDA kernels are {'built with ' + nvcc if nvcc else 'left out'}")
    products: dict[str, Path] = {}
    with (build_dir / "build.ninja").open("w") as file:
        n = ninja_syntax.Writer(file, width=10**6)
        n.variable("cxx", os.environ.get("CXX", "g++"))
        n.variable("flags", f'{CXX_FLAGS} -DDUOMOE_VERSION=\\"{VERSION}\\" -I{CORE}')
        n.rule(
            "cxx", "$cxx $flags $more -MMD -MF $out.d -c $in -o $out", depfile="$out.d", deps="gcc"
        )
        n.rule("link", "$cxx -shared -Wl,--no-undefined -o $out $in $more -lpthread -ldl")
        if nvcc:
            archs = os.environ.get("DUOMOE_CUDA_ARCHS", "90").split(";")
            codes = [f"-gencode arch=compute_{a},code=sm_{a}" for a in archs]
            codes.append(f"-gencode arch=compute_{archs[-1]},code=compute_{archs[-1]}")
            n.variable("nvcc", nvcc)
            n.rule(
                "nvcc",
                f"$nvcc {NVCC_FLAGS} {' '.join(codes)} -I{CORE} -MMD -MF $out.d -c $in -o $out",
                depfile="$out.d",
                deps="gcc",
            )

        def compile_all(sources: list[Path], more: str = "") -> list[str]:
            objects = []
            for source in sorted(sources):
                out = str(source.relative_to(ROOT)).replace("/", "_") + ".o"
                flags = " ".join([more, ISA_FLAGS.get(source.name, "")]).strip()
                if source.suffix == ".cu":
                    n.build(out, "nvcc", str(source))
                else:
                    n.build(out, "cxx", str(source), variables={"more": flags})
                objects.append(out)
            return objects

        sources = [*CORE.glob("*.cc"), *(CORE / "cpu").glob("*.cc")]
        if platform.machine() not in ("x86_64", "AMD64"):
            sources = [s for s in sources if s.name not in ISA_FLAGS]
        link = "-Wl,-soname,libduomoe.so"
        if nvcc:
            sources += (CORE / "cuda").glob("*.cu")
            link += f" -L{cuda_library_dir(nvcc)} -Wl,--exclude-libs,ALL -lcudart_static -lrt"
        n.build("libduomoe.so", "link", compile_all(sources), variables={"more": link})
        products["duomoe/lib/libduomoe.so"] = build_dir / "libduomoe.so"

        core = "-L. -lduomoe " + " ".join(
            f"-Wl,-rpath,'$$ORIGIN/../{p}'" for p in ("duomoe/lib", "common/duomoe/lib")
        )
        if has("jax"):
            import jax.ffi
            import pybind11

            includes = [
                jax.ffi.include_dir(),
                pybind11.get_include(),
                sysconfig.get_path("include"),
            ]
            name = "_binding" + sysconfig.get_config_var("EXT_SUFFIX")
            objects = compile_all(
                [ROOT / "jax_frontend" / "csrc" / "binding.cc"],
                " ".join(f"-isystem {i}" for i in includes),
            )
            out = f"jax_frontend{name}"
            n.build(
                out,
                "link",
                objects,
                implicit=["libduomoe.so"],
                variables={"more": f"{core} -Wl,-z,undefs"},
            )
            products[f"jax_frontend/{name}"] = build_dir / out
        if has("torch"):
            torch_dir = Path(importlib.util.find_spec("torch").origin).parent
            # The stable ABI of torch 2.11, so that one build serves every later release.
            more = f"-isystem {torch_dir}/include -DTORCH_TARGET_VERSION=0x020b000000000000ULL"
            objects = compile_all([ROOT / "torch_frontend" / "csrc" / "binding.cc"], more)
            out = "torch_frontend_binding.so"
            n.build(
                out,
                "link",
                objects,
                implicit=["libduomoe.so"],
                variables={
                    "more": f"{core} -L{torch_dir}/lib -Wl,--no-as-needed -ltorch -ltorch_cpu -lc10"
                    " -Wl,--as-needed -Wl,--unresolved-symbols=ignore-in-shared-libs"
                },
            )
            products["torch_frontend/_binding.so"] = build_dir / out
        n.close()
    executable = Path(BIN_DIR) / "ninja"
    subprocess.run([str(executable), "-C", str(build_dir)], check=True)
    return products


class NinjaBuild(build_ext):
    """Stands in for setuptools' compiler: one Ninja build makes all native files."""

    def run(self) -> None:
        """Build, then copy the products to where the packages are."""
        tag = f"{sys.implementation.cache_tag}-{'cuda' if find_nvcc() else 'cpu'}"
        self._products = build_native(ROOT / "build" / f"native-{tag}")
        # setuptools reuses the folder: a binding of an earlier build must not get into this wheel.
        for pattern in ("duomoe/lib/*", "*_frontend/_binding*.so"):
            for stale in Path(self.build_lib).glob(pattern):
                stale.unlink()
        for inside, built in self._products.items():
            target = self._target(inside)
            target.parent.mkdir(parents=True, exist_ok=True)
            # Not copied over in place: a running process may have the old file mapped.
            target.unlink(missing_ok=True)
            shutil.copy2(built, target)

    def _target(self, inside: str) -> Path:
        if self.inplace:
            return ROOT / ("common/" + inside if inside.startswith("duomoe/") else inside)
        return Path(self.build_lib) / inside

    def get_outputs(self) -> list[str]:
        """The files of the wheel."""
        return [str(Path(self.build_lib) / inside) for inside in getattr(self, "_products", {})]

    def get_output_mapping(self) -> dict[str, str]:
        """For an editable install: file of the wheel to file of the source tree."""
        return {}


setup(
    # Named so that setuptools knows the wheel is for one platform; NinjaBuild makes what is in it.
    ext_modules=[Extension("duomoe.lib.libduomoe", sources=[])],
    cmdclass={"build_ext": NinjaBuild},
)
