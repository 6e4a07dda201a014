#!/usr/bin/env bash
# Build, conformance on every row that this machine has, and the CPU bench on one core and on all: one call, about five
# minutes, results under $OUT. For a many-core machine that starts bare and has no network: wheels of what it lacks may
# lie in .whl/. Run from the repository's root:
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

# Exactly these extra peers: every kernel family of NumKong that answers to a row of ours, and torch.compile on bf16.
families=(numkong:haswell numkong:alder numkong:icelake numkong:genoa numkong:sapphireamx)
bench() { "$python" -P bench/run.py --out "$OUT/$1" "${@:2}" 2>&1 | tee -a "$OUT/bench.txt"; }

step "one core, with peers"
bench cpu.jsonl --workload rerank colpali --seconds 2 --limit "${PEERS_LIMIT:-90}" --part scores \
    --contender "numpy loop" "jax map" "torch mm" "torch.compile" numkong "${families[@]}"
bench cpu.jsonl --workload ragged 1x10 d768 16x1000 --seconds 2 --limit "${PEERS_LIMIT:-60}" --part scores \
    --contender "numpy loop" "numpy reduceat" "jax map" "torch mm" numkong

step "one core, ours"
bench cpu.jsonl --seconds 1 --limit "${OURS_LIMIT:-50}" --part scores topk packing overhead --contender --workload \
    "data: real" "data: clustered 1.0" "data: clustered 0.5" "data: clustered 0.2" "data: clustered 0.05" \
    "data: heavy-tailed" "data: near-duplicates" "top-10: random" "top-10: related" "top-10: real" d384 b100 short-100k

step "$many threads"
bench cpu.jsonl --threads "$many" --seconds 2 --limit "${MANY_LIMIT:-50}" --part scores \
    --workload rerank ragged colpali 16x1000 short-100k --contender "jax map" "torch mm" numkong
step "done"
