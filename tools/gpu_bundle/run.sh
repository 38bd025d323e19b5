#!/usr/bin/env bash
# Tests and measures hybridkv on a GPU machine without a network. pack.py puts this file into the bundle.
#
#   bash run.sh
#
# Results go to $OUT (default: ./gpu_results):
#   summary.txt  a line for each finished stage; read it first
#   logs.tgz     logs and JUnit reports of all stages
#   goals.jsonl  a line for each measurement
#
#   DRY=1        runs every stage without a GPU as far as possible; skipped tests are no failures then
#   STAGES="..." the stages to run; default: all
#   BUDGET_S     limit for all stages together, in seconds; default 560
#   WORK         build folder; default: ./gpu_work, kept between runs
#
# The card's settings are read and never changed.
set -uo pipefail

BUNDLE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
TREE=$BUNDLE/tree
OUT=$(realpath -m "${OUT:-gpu_results}")
WORK=$(realpath -m "${WORK:-gpu_work}")
SITE=$WORK/site
LOGS=$WORK/logs
SUMMARY=$OUT/summary.txt
BUDGET_S=${BUDGET_S:-560}
ALL_STAGES="facts packages host build copies kernels native engine proof goals oracle memcheck racecheck"
ALL_STAGES+=" engines_engine engines_native tuning"
STAGES=${STAGES:-$ALL_STAGES}
PYTHON=${PYTHON:-python3}
DRY=${DRY:-}
CUDA_ARCHS="-gencode=arch=compute_90,code=sm_90 -gencode=arch=compute_80,code=compute_80"

log() { printf '[%4ds] %s\n' "$SECONDS" "$*"; }
left_s() { echo $((BUDGET_S - SECONDS)); }
note() { echo "$*" | tee -a "$SUMMARY"; }

# stage NAME LIMIT_S COMMAND...: runs a command for at most LIMIT_S seconds, and at most the rest of the budget. The
# summary gets the last line of its output that begins with "result:", and all lines that begin with "note:". Status 3:
# the machine lacks something optional.
stage() {
  local name=$1 limit_s=$2 rc=0 began_s=$SECONDS result
  shift 2
  case " $STAGES " in *" $name "*) ;; *) return 0 ;; esac
  if (($(left_s) < 15)); then
    note "$name: NOT RUN, no time left of $BUDGET_S s"
    return 0
  fi
  ((limit_s > $(left_s) - 5)) && limit_s=$(($(left_s) - 5))
  log "$name (at most $limit_s s)"
  timeout --kill-after=5 "$limit_s" "$@" >"$LOGS/$name.log" 2>&1 </dev/null || rc=$?
  result=$(grep '^result: ' "$LOGS/$name.log" | tail -1 | cut -c9-)
  [ -n "$result" ] || result=$(grep -v '^[[:space:]]*$' "$LOGS/$name.log" | tail -1)
  case $rc in
  0) note "$name: ok in $((SECONDS - began_s)) s: ${result:0:200}" ;;
  3) note "$name: NOT HERE: ${result:0:200}" ;;
  124 | 137) note "$name: FAILED, not done in $limit_s s: ${result:0:200}" ;;
  *) note "$name: FAILED (rc $rc) in $((SECONDS - began_s)) s: ${result:0:200}" ;;
  esac
  case $rc in 0 | 3) ;; *) tail -25 "$LOGS/$name.log" | cut -c1-240 ;; esac
  grep '^note: ' "$LOGS/$name.log" | cut -c7- | while IFS= read -r line; do note "  $line"; done
  tar -czf "$OUT/logs.tgz" -C "$LOGS" . 2>/dev/null
  return 0
}

facts() {
  local asked=name,driver_version,memory.total,mig.mode.current
  asked+=,pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current
  nvidia-smi
  nvidia-smi --query-gpu=$asked --format=csv
  nvidia-smi topo -m | head -8
  nvcc --version | tail -2
  g++ --version | head -1
  uname -r && nproc && free -g | head -2 && ulimit -l
  cat /sys/kernel/mm/transparent_hugepage/enabled /proc/sys/kernel/io_uring_disabled 2>/dev/null
  ls /sys/devices/system/node 2>/dev/null | grep -c '^node'
  "$PYTHON" "$BUNDLE/checks.py" facts
}

# Installs the packages that the machine's Python lacks, from the bundle.
packages() {
  "$PYTHON" "$BUNDLE/fill_site.py" "$BUNDLE/wheels" "$SITE" || return 1
  [ -e "$BUNDLE/vllm.txz" ] && ! "$PYTHON" -c 'import vllm' 2>/dev/null || return 0
  # Renamed when complete, so that a partial copy is not used.
  rm -rf "$WORK/vllm" "$WORK/vllm.part" && mkdir "$WORK/vllm.part" &&
    tar -xJf "$BUNDLE/vllm.txz" -C "$WORK/vllm.part" && mv "$WORK/vllm.part" "$WORK/vllm" &&
    echo "note: vLLM is the bundle's"
}

# build_libraries FOLDER: builds the CUDA libraries. nvcc compiles all files, because it finds its headers and runtime.
build_libraries() {
  local to=$1 objects=$WORK/objects name pids=() pid rc=0
  command -v nvcc >/dev/null || { echo "there is no nvcc" && return 1; }
  mkdir -p "$to" "$objects"
  local flags="-O2 -Xcompiler -fPIC,-Wall -I$TREE/csrc/include -I$TREE/csrc/cuda"
  nvcc -std=c++17 $flags $CUDA_ARCHS -c "$TREE/csrc/cuda/kernels.cu" -o "$objects/kernels.o" &
  pids+=($!)
  for name in batch_copy job copier tests/plain_api; do
    nvcc -std=c++20 $flags -c "$TREE/csrc/cuda/$name.cc" -o "$objects/$(basename $name).o" &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid" || rc=1; done
  ((rc == 0)) || { echo "the CUDA libraries do not compile" && return 1; }
  nvcc -shared -cudart static -o "$to/libhybridkv_cuda.so" "$objects"/{copier,job,batch_copy,kernels}.o &&
    nvcc -shared -cudart static -o "$to/libhybridkv_cuda_plain.so" "$objects"/{plain_api,job,batch_copy,kernels}.o
}

# build_native FOLDER [FLAG...]: builds hybridkv.native for $PYTHON, as _cpu.*.so. With -DPy_LIMITED_API=0x030C0000 the
# result is for Python 3.12 and later.
build_native() {
  local to=$1 nanobind include suffix source pids=() pid rc=0
  shift
  local path=$SITE${PYTHONPATH:+:$PYTHONPATH}
  nanobind=$(PYTHONPATH=$path "$PYTHON" -c 'import nanobind; print(nanobind.source_dir())') || return 1
  include=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("include"))')
  suffix=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
  [[ " $* " == *Py_LIMITED_API* ]] && suffix=.abi3.so
  [ -e "$include/Python.h" ] || { echo "there is no Python.h in $include" && return 1; }
  local objects=$WORK/native$suffix
  mkdir -p "$objects" "$to"
  local flags="-std=c++20 -O2 -fPIC -fvisibility=hidden -fno-strict-aliasing -ffunction-sections -fdata-sections"
  flags+=" -DNDEBUG -I$TREE -I$TREE/csrc/include -isystem $include -isystem $nanobind/../include"
  flags+=" -isystem $nanobind/../ext/robin_map/include"
  for source in "$TREE"/csrc/{cpu,ledger,bindings}/*.cc "$nanobind/nb_combined.cpp"; do
    while (($(jobs -rp | wc -l) >= $(nproc))); do wait -n || rc=1; done
    g++ $flags "$@" -c "$source" -o "$objects/$(basename "$source").o" &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid" || rc=1; done
  ((rc == 0)) || return 1
  g++ -shared -o "$to/_cpu$suffix" "$objects"/*.o -lpthread -l:libstdc++.a -Wl,--gc-sections -Wl,--strip-all \
    -Wl,--version-script="$TREE/csrc/bindings/exports.lds"
}

# Builds the CUDA libraries. A library that cannot be built is taken from the bundle.
build() {
  local kernels=$SITE/hybridkv/cuda_kernels library said=
  mkdir -p "$kernels" "$WORK/built"
  cp "$TREE/csrc/cuda/src/hybridkv/cuda_kernels/__init__.py" "$kernels/"
  build_libraries "$WORK/built"
  for library in libhybridkv_cuda.so libhybridkv_cuda_plain.so; do
    if [ -e "$WORK/built/$library" ]; then
      cp "$WORK/built/$library" "$kernels/" && said+="$library built here; "
    elif [ -e "$BUNDLE/prebuilt/$library" ]; then
      cp "$BUNDLE/prebuilt/$library" "$kernels/" && said+="$library from the bundle; "
    else
      said+="$library MISSING; "
    fi
  done
  "$PYTHON" "$BUNDLE/checks.py" libraries || said+="libhybridkv_cuda.so CANNOT BE LOADED; "
  echo "result: ${said%; }"
  [ -n "$DRY" ] || [[ "$said" != *MISSING* && "$said" != *CANNOT* ]]
}

native_imports() { "$PYTHON" -c 'import hybridkv.native as native; print("instructions:", *native.levels())'; }

# Takes hybridkv.native from the bundle if this Python can import it, and builds it otherwise. The libraries cannot be
# imported without it.
host() {
  local native=$SITE/hybridkv/native
  mkdir -p "$native"
  cp "$TREE/csrc/bindings/src/hybridkv/native/__init__.py" "$native/"
  cp "$BUNDLE"/prebuilt/_cpu.*.so "$native/" 2>/dev/null
  native_imports && echo "result: hybridkv.native from the bundle" && return 0
  rm -f "$native"/*.so
  build_native "$native" && native_imports && echo "result: hybridkv.native built here" && return 0
  rm -rf "$native"
  echo "result: hybridkv.native cannot be built for this Python" && return 1
}

# Prints the implementation of the copy mode "engine".
copies() { "$PYTHON" "$BUNDLE/checks.py" copies; }

# tests NAME FILE [ARGUMENT...]: runs pytest. Fails if no test ran, or if one was skipped (except with DRY).
tests() {
  local name=$1 file=$2 rc=0 plain=$SITE/hybridkv/cuda_kernels/libhybridkv_cuda_plain.so
  shift 2
  [ ! -e "$plain" ] || export HYBRIDKV_CUDA_PLAIN=$plain
  (cd "$TREE" && "$PYTHON" -m pytest -q -c /dev/null --rootdir="$TREE" --import-mode=importlib -p no:cacheprovider \
    --tb=short -o junit_family=xunit1 --junitxml="$LOGS/$name.xml" "$file" "$@") || rc=$?
  "$PYTHON" "$BUNDLE/checks.py" report "$LOGS/$name.xml" || rc=1
  return $rc
}

# measure FILE [ARGUMENT...]: runs a benchmark. Checks for a GPU first, because a benchmark without one exits with 0.
measure() {
  local said
  said=$("$PYTHON" "$BUNDLE/checks.py" gpu) || { echo "$said" && return 1; }
  "$PYTHON" "$TREE/bench/$1" "${@:2}"
}

oracle() {
  "$PYTHON" "$BUNDLE/checks.py" vllm || return 3
  tests oracle "$TREE/tests/gpu/test_oracle_gpu.py"
}

# engines COPIES: runs a vLLM engine of each model, all at the same time. Each prints its result when it ends.
engines() {
  local models=(gemma3 gpt-oss qwen3-next) model pids=() pid num_equal=0
  "$PYTHON" "$BUNDLE/checks.py" vllm || return 3
  # The next stage uses the same Triton cache.
  export TRITON_CACHE_DIR=$WORK/triton TRITON_CACHE_AUTOTUNING=1
  for model in "${models[@]}"; do
    engine_of "$model" "$1" &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid" && num_equal=$((num_equal + 1)); done
  echo "result: $num_equal of ${#models[@]} engines: warm answers equal cold ones"
  ((num_equal == ${#models[@]}))
}

# engine_of MODEL COPIES
engine_of() {
  local log=$LOGS/engine_$2_$1.log
  if "$PYTHON" "$BUNDLE/engine_on_gpu.py" "$1" "$2" >"$log" 2>&1; then
    echo "note: $1: warm answers equal cold ones; $(grep -o 'copies of this GPU: .*' "$log")"
  else
    tail -8 "$log"
    echo "note: $1: FAILED, see $(basename "$log")"
    return 1
  fi
}

# sanitize TOOL EXPRESSION: runs the kernel tests that match the expression under a sanitizer. Large cases take minutes
# there, and a test that makes a call fail on purpose would be reported.
sanitize() {
  local tool=$1
  export HYBRIDKV_CUDA_PLAIN=$SITE/hybridkv/cuda_kernels/libhybridkv_cuda_plain.so
  command -v compute-sanitizer >/dev/null || { echo "result: there is no compute-sanitizer" && return 3; }
  (cd "$TREE" && compute-sanitizer --tool "$tool" --error-exitcode 9 --target-processes all \
    "$PYTHON" -m pytest -q -c /dev/null --rootdir="$TREE" --import-mode=importlib -p no:cacheprovider \
    "$TREE/tests/gpu/test_kernels.py" -k "$2")
}

[ "${1:-}" = build_prebuilt ] && {
  # For pack.py: builds the libraries on this machine and puts them into the bundle.
  mkdir -p "$BUNDLE/prebuilt" "$WORK"
  packages
  build_libraries "$BUNDLE/prebuilt"
  limited=
  "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 12))' && limited=-DPy_LIMITED_API=0x030C0000
  build_native "$BUNDLE/prebuilt" $limited
  exit 0
}

mkdir -p "$OUT" "$WORK" "$LOGS" "$SITE"
: >"$SUMMARY"
note "bundle of commit $(cat "$BUNDLE/COMMIT")${DRY:+, a dry run}"
# Tests that need a GPU fail without one: see tests/gpu/conftest.py.
[ -n "$DRY" ] || export HYBRIDKV_TEST_GPUS=1
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HYPOTHESIS_STORAGE_DIRECTORY=$WORK/hypothesis
path=$SITE
for folder in "$TREE"/{libs/*/src,libs/transfer/tests,tests/gpu,tests/support,tests}; do
  path+=:$folder
done
path+=:$TREE/bench:$TREE/examples${PYTHONPATH:+:$PYTHONPATH}
export PYTHONPATH=$path:$WORK/vllm VLLM_USE_FLASHINFER_SAMPLER=0
export BUNDLE TREE OUT WORK SITE LOGS PYTHON DRY CUDA_ARCHS
# `timeout` runs a new bash, which gets the functions through the environment.
export -f facts packages build build_libraries build_native native_imports host copies tests measure oracle engines
export -f engine_of sanitize

stage facts 40 bash -c facts
stage packages 30 bash -c packages
# All later stages import hybridkv.native.
stage host 120 bash -c host
stage build 150 bash -c build
stage copies 60 bash -c copies
stage kernels 120 bash -c 'tests kernels "$TREE/tests/gpu/test_kernels.py"'
stage native 90 bash -c 'tests native "$TREE/tests/gpu/test_cuda_engine_gpu.py" -k "not streams"'
stage engine 60 bash -c 'tests engine "$TREE/tests/gpu/test_cuda_engine_gpu.py" -k streams'
stage proof 60 bash -c 'tests proof "$TREE/tests/gpu/test_copy_proof_gpu.py"'
stage goals 150 bash -c 'measure gpu_goals.py --json "$OUT/goals.jsonl"'
stage oracle 120 bash -c oracle
export SMALL="not 100 and not 4194304 and not 2097152"
stage memcheck 120 bash -c 'sanitize memcheck "(reference or checksum or blocks_does_not) and $SMALL"'
stage racecheck 60 bash -c 'sanitize racecheck "(reference or checksum) and $SMALL"'
stage engines_engine 240 bash -c "engines engine"
stage engines_native 120 bash -c "engines native"
stage tuning 90 bash -c 'measure gpu_copy.py --mebibytes 64 --rounds 3 --json "$OUT/gpu_copy.json"'

echo
cat "$SUMMARY"
! grep -qE ': (FAILED|NOT RUN)' "$SUMMARY"
