#!/usr/bin/env bash
# Builds duomoe with CUDA into the current Python, runs the GPU tests, the comparison of the front ends, the
# sanitizers, the GPU check, the GPU benchmark (BENCH="--quick" shortens it) and the memory benchmark: about ten
# minutes. ONLY="build tests" runs the steps named; SHARES=12 runs the tests in so many processes side by side.
# Results go to the folder named (default: out/gpu). Needs nvcc, a GPU, JAX with CUDA, torch with CUDA, and
# pytest, pybind11, ninja and setuptools in the current Python.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-out/gpu}
mkdir -p "$out"
export XLA_PYTHON_CLIENT_PREALLOCATE=false DUOMOE_TEST_DEVICE=cuda
failed=""
step() {  # step NAME COMMAND...: one log a step, the tail on the terminal
  local name=$1 start=$SECONDS
  shift
  case " ${ONLY:-$name} " in *" $name "*) ;; *) return ;; esac
  if timeout "${STEP_SECONDS:-240}" "$@" >"$out/$name.log" 2>&1; then echo "ok      $name ($((SECONDS - start)) s)"; else
    echo "FAILED  $name ($((SECONDS - start)) s)"
    failed="$failed $name"
    tail -n "${TAIL:-25}" "$out/$name.log"
  fi
}
shares() {  # shares NAME PYTEST-ARGUMENTS...: SHARES processes side by side, each with its share of the tests
  local name=$1 count=${SHARES:-7} i pids=() rc=0
  shift
  rm -f "$out/$name"-share-*.log
  trap "cat '$out/$name'-share-*.log" EXIT  # also where the time is up
  for i in $(seq "$count"); do
    DUOMOE_TEST_SHARE=$i/$count python3 -m pytest -m cuda -p no:cacheprovider "$@" >"$out/$name-share-$i.log" 2>&1 &
    pids+=($!)
  done
  [ ${#pids[@]} -gt 0 ] || { echo "SHARES=$count: allowed is a number above 0"; return 1; }
  for i in "${pids[@]}"; do wait "$i" || rc=1; done
  return $rc
}
export out
export -f shares
step build env DUOMOE_CUDA=1 DUOMOE_REQUIRE=jax,torch python3 -m pip install --no-build-isolation --no-deps --editable .
[ -z "$failed" ] || exit 1
step tests bash -c 'shares "$@"' - tests tests/test_cuda.py tests/test_cuda_[!l]*.py
step tests-ops bash -c 'shares "$@"' - tests-ops --ignore-glob 'tests/test_cuda*'
step verify-float32 duomoe verify --device cuda --json "$out/verify-float32.json"
step verify-bfloat16 duomoe verify --device cuda --dtype bfloat16 --json "$out/verify-bfloat16.json"
step tests-large python3 -m pytest -m cuda tests/test_cuda_large*.py -p no:cacheprovider
for tool in memcheck racecheck; do
  step "$tool" compute-sanitizer --tool "$tool" --error-exitcode 3 python3 benchmarks/sanitize.py
done
step gpu_check python3 benchmarks/gpu_check.py --out "$out"
step memory python3 benchmarks/memory.py --device cuda --out "$out"
# shellcheck disable=SC2086  # several words
step gpu_bench python3 benchmarks/gpu_bench.py --out "$out" ${BENCH:-}
for table in gpu_check memory gpu_bench; do [ ! -f "$out/$table.log" ] || cat "$out/$table.log"; done
[ -z "$failed" ] || { echo "failed:$failed"; exit 1; }
