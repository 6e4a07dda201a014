#!/usr/bin/env bash
# Build, conformance on every row that this machine has, and the CPU bench on one core and on all: one call, about five
# minutes, results under $OUT. For a many-core machine that starts bare and has no network: wheels of what it lacks may
# lie in .whl/; QUICK=1 is a trial. Run from the repository's root:
#
#     OUT=results NUMKONG_COMMIT=$(git rev-parse --short=12 HEAD) bash bench/run_host.sh
set -o pipefail
: "${OUT:?where results go}"
python=${PYTHON:-python3}
site=$(mktemp -d)
many=${THREADS:-$(nproc)}
export PYTHONPATH=$site PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
mkdir -p "$OUT"
SECONDS=0
step() { echo "== $1 (at $SECONDS s)"; }

step "wheels and build"
if compgen -G ".whl/*.whl" > /dev/null; then
    "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" .whl/*.whl ||
        exit 1
fi
"$python" -m pip install -q --no-index --no-deps --no-build-isolation --no-cache-dir --upgrade --target "$site" . 2>&1 |
    tee "$OUT/build.txt" || exit 1
"$python" -P -c "import numkong_py as nk; [print(row) for row in nk.backends() if row.device == 'cpu']" |
    tee "$OUT/rows.txt" || exit 1

step "conformance, every row"
workers=()
"$python" -P -c "import xdist" 2> /dev/null && workers=(-n "$many")
timeout "${CONFORMANCE_LIMIT:-150}" "$python" -P -m pytest tests/test_conformance.py tests/test_capi.py \
    -q -p no:cacheprovider "${workers[@]}" > "$OUT/conformance.txt" 2>&1
echo "pytest: exit $?"
tail -n 12 "$OUT/conformance.txt"

bench() { "$python" bench/run.py ${QUICK:+--quick} --out "$OUT/cpu.jsonl" "$@" 2>&1 | tee -a "$OUT/bench.txt"; }
peers=("numpy loop" "jax map" "torch mm" numkong)
families=(numkong:haswell numkong:alder numkong:icelake numkong:genoa numkong:sapphireamx) # one for every row of ours
limit() { echo --seconds 2 --limit $(($1 * ${PERCENT:-100} / 100)) --part; } # PERCENT scales every step's time

step "one core, with peers"
bench $(limit 120) scores --workload rerank colpali --contender "${peers[@]}" "${families[@]}"
bench $(limit 60) scores --workload ragged 1x10 d768 16x1000 --contender "${peers[@]}" "numpy reduceat"

step "one core, ours"
bench $(limit 60) scores topk kernels packing overhead --contender --workload "data: real" "data: clustered 1.0" \
    "data: clustered 0.5" "data: clustered 0.2" "data: clustered 0.05" "data: heavy-tailed" "data: near-duplicates" \
    "top-10: random" "top-10: related" "top-10: real" d384 b100 short-100k

step "$many threads"
bench $(limit 50) scores --threads "$many" --workload rerank ragged colpali 16x1000 short-100k --contender "${peers[@]}"
step "done"
