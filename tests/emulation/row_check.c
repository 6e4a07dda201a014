/* row_check.c: a row against serial in plain C, for processors that are emulated: a program of milliseconds where
 * Python takes seconds. tests/test_arm_rows.py builds it with faults in the row and counts its instructions;
 * tests/test_wasm_row.py runs it in an engine.
 *
 *   row_check same ROW [PRECISION]
 *       collections of many shapes, exact or coded (nk_precision_t): 0 when scores and winners are the same bits
 *   row_check work ROW DTYPE QUERY DOCUMENT DEPTH
 *       one score of random tokens, or of near-duplicates for a negative depth */
#include <numkong/backend.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { documents_k = 7, queries_k = 3 };

static nk_u64_t nk_state_ = 1;

static nk_f32_t nk_random_(void) { /* within -1 .. 1, a multiple of 2^-20 */
    nk_state_ = nk_state_ * 6364136223846793005u + 1442695040888963407u;
    return (nk_f32_t)((nk_i32_t)(nk_state_ >> 43) - (1 << 20)) * 0x1p-20f;
}

/* What selects a row, which must be the one that is selected here. */
static nk_capability_t nk_mask_of_(char const *row) {
    nk_capability_t const detected = nk_cpu_capabilities_detected();
    for (nk_size_t index = 0; index != nk_backend_count(); ++index) {
        nk_backend_t const *const backend = nk_backend_at(index);
        if (strcmp(backend->name, row)) continue;
        if (nk_backend_best(nk_f32_k, backend->required & detected) == backend) return backend->required;
        fprintf(stderr, "%s is not available\n", row);
        exit(2);
    }
    fprintf(stderr, "no row %s\n", row);
    exit(2);
}

static void nk_must_(nk_status_t status, char const *what) {
    if (status == nk_success_k) return;
    fprintf(stderr, "%s: %s\n", what, nk_status_name(status));
    exit(2);
}

static void *nk_aligned_(nk_size_t bytes) { /* never freed: the process is short */
    nk_u8_t *const block = (nk_u8_t *)calloc(bytes + 128, 1);
    if (!block) exit(2);
    return block + (64 - (uintptr_t)block % 64);
}

/* The 16-bit pattern of a value: bfloat16 cut short, or the binary16 of a multiple of 2^-10 in -1 .. 1. */
static nk_u16_t nk_half_(nk_dtype_t dtype, nk_f32_t value) {
    nk_u32_t bits;
    if (dtype == nk_f16_k) value = (nk_f32_t)(nk_i32_t)(value * 1024) / 1024;
    memcpy(&bits, &value, 4);
    if (dtype == nk_bf16_k) return (nk_u16_t)(bits >> 16);
    return value == 0 ? 0 : (nk_u16_t)((bits >> 16 & 0x8000) | ((bits >> 13) - (112u << 10)) % 0x8000);
}

/* Tokens of a kind: 0 random, 1 near-duplicates, 2 few values with many ties. */
static void *nk_tokens_(nk_dtype_t dtype, nk_size_t count, nk_size_t depth, int kind) {
    nk_size_t const bytes = nk_dtype_bytes(dtype);
    nk_u8_t *const tokens = (nk_u8_t *)nk_aligned_(count * depth * bytes);
    nk_f32_t *const base = (nk_f32_t *)nk_aligned_(depth * sizeof(nk_f32_t));
    for (nk_size_t k = 0; k != depth; ++k) base[k] = nk_random_();
    for (nk_size_t at = 0; at != count * depth; ++at) {
        nk_f32_t value = nk_random_();
        if (kind == 1) value = base[at % depth] * 0.75f + value * 0x1p-7f;
        if (kind == 2) value = (nk_f32_t)(nk_i32_t)(value * 1.5f);
        nk_u16_t const half = nk_half_(dtype, value);
        if (dtype == nk_f32_k)
            memcpy(tokens + at * 4, &value, 4);
        else
            memcpy(tokens + at * 2, &half, 2);
    }
    return tokens;
}

#define NK_CALL_(function, dtype, ...)                                                                                 \
    ((dtype) == nk_bf16_k  ? nk_maxsim_##function##_bf16_best(__VA_ARGS__)                                             \
     : (dtype) == nk_f16_k ? nk_maxsim_##function##_f16_best(__VA_ARGS__)                                              \
                           : nk_maxsim_##function##_f32_best(__VA_ARGS__))

/* A packing of `sets` sets; with the precision's codes. */
static void *nk_packed_of_(nk_dtype_t dtype, nk_precision_t precision, void const *tokens, nk_size_t const *counts,
                           nk_size_t sets, nk_size_t depth, nk_capability_t mask) {
    nk_u64_t const address = (nk_u64_t)(uintptr_t)tokens;
    nk_u64_t offsets[documents_k + 1] = {0};
    for (nk_size_t set = 0; set != sets; ++set) offsets[set + 1] = offsets[set] + counts[set];
    nk_i64_t const element = (nk_i64_t)nk_dtype_bytes(dtype), row = element * (nk_i64_t)depth;
    nk_maxsim_pack_t job = {{1, &address, &offsets[sets], &row, &element}, offsets, sets, depth, 0, NULL};
    nk_coding_t const coding = {(nk_u32_t)precision, 0, 0};
    nk_packed_header_t header;
    nk_must_(nk_packed_describe(nk_backend_best(dtype, mask), dtype, &coding, sets, offsets[sets], depth, &header),
             "size");
    job.packed = nk_aligned_(header.total_bytes);
    if (precision == nk_exact_k)
        nk_must_(NK_CALL_(pack_corpus, dtype, &job, mask, NULL), "pack");
    else
        nk_must_(nk_maxsim_pack_coded(dtype, &coding, &job, mask, NULL), "pack");
    return job.packed;
}

/* Scores and winners of all queries with all documents, packed or as arrays, as bytes. */
static void *nk_scored_(nk_dtype_t dtype, void *queries, void *documents, nk_maxsim_pack_t const *arrays,
                        nk_metric_t metric, nk_size_t longest, nk_capability_t mask, nk_size_t *bytes) {
    nk_size_t const score_bytes = dtype == nk_f32_k ? 8 : 4, winners = queries_k * documents_k * longest;
    *bytes = queries_k * documents_k * score_bytes + winners * sizeof(nk_i32_t);
    nk_u8_t *const results = (nk_u8_t *)nk_aligned_(*bytes);
    nk_maxsim_corpus_t job;
    memset(&job, 0, sizeof(job));
    job.queries = queries, job.documents = documents, job.arrays = arrays;
    job.query_end = queries_k, job.document_end = job.score_stride = documents_k;
    job.metric = metric;
    job.scores = results;
    job.argmax = (nk_i32_t *)(results + queries_k * documents_k * score_bytes);
    job.token_stride = longest;
    nk_must_(NK_CALL_(corpus, dtype, &job, mask, NULL), "score");
    return results;
}

/* 1 when arrays that were not packed have the given results. */
static int nk_same_in_place_(nk_dtype_t dtype, void *queries, void *tokens, nk_size_t const *counts, nk_size_t depth,
                             nk_metric_t metric, nk_size_t longest, nk_capability_t mask, void const *expected) {
    nk_u64_t const address = (nk_u64_t)(uintptr_t)tokens;
    nk_u64_t offsets[documents_k + 1] = {0};
    for (nk_size_t set = 0; set != documents_k; ++set) offsets[set + 1] = offsets[set] + counts[set];
    nk_i64_t const element = (nk_i64_t)nk_dtype_bytes(dtype), row = element * (nk_i64_t)depth;
    nk_maxsim_pack_t const arrays = {
        {1, &address, &offsets[documents_k], &row, &element}, offsets, documents_k, depth, 0, NULL};
    nk_size_t bytes;
    void *const results = nk_scored_(dtype, queries, NULL, &arrays, metric, longest, mask, &bytes);
    return memcmp(results, expected, bytes) == 0;
}

static int nk_same_(nk_precision_t precision, char const *row) {
    static nk_size_t const query_counts[queries_k] = {5, 32, 19}, depths[] = {1, 3, 7, 33, 64, 130};
    static nk_size_t const counts[documents_k] = {3, 0, 40, 130, 17, 64, 33};
    static nk_dtype_t const dtypes[] = {nk_bf16_k, nk_f16_k, nk_f32_k};
    int wrong = 0, cases = 0;
    for (int dtype_at = 0; dtype_at != 3; ++dtype_at)
        for (int depth_at = 0; depth_at != 6; ++depth_at)
            for (int kind = 0; kind != 3; ++kind) {
                nk_dtype_t const dtype = dtypes[dtype_at];
                nk_size_t const depth = depths[depth_at];
                void *const queries = nk_tokens_(dtype, 56, depth, kind);
                void *const documents = nk_tokens_(dtype, 287, depth, kind);
                nk_capability_t const masks[2] = {nk_mask_of_("serial"), nk_mask_of_(row)};
                nk_metric_t const metric = (nk_metric_t)(cases++ % 3);
                void *results[2];
                nk_size_t bytes;
                void *packed = NULL;
                for (int side = 0; side != 2; ++side) {
                    packed = nk_packed_of_(dtype, nk_exact_k, queries, query_counts, queries_k, depth, masks[side]);
                    results[side] =
                        nk_scored_(dtype, packed,
                                   nk_packed_of_(dtype, precision, documents, counts, documents_k, depth, masks[side]),
                                   NULL, metric, 32, masks[side], &bytes);
                }
                int same = memcmp(results[0], results[1], bytes) == 0;
                if (precision == nk_exact_k)
                    same &=
                        nk_same_in_place_(dtype, packed, documents, counts, depth, metric, 32, masks[1], results[0]);
                wrong += !same;
            }
    printf("%s: %d of %d differ\n", row, wrong, cases);
    return wrong != 0;
}

static int nk_work_(char **words) {
    nk_capability_t const mask = nk_mask_of_(words[0]);
    nk_dtype_t const dtype = strcmp(words[1], "bf16") == 0  ? nk_bf16_k
                             : strcmp(words[1], "f16") == 0 ? nk_f16_k
                                                            : nk_f32_k;
    nk_size_t const query_count = strtoull(words[2], NULL, 10), document_count = strtoull(words[3], NULL, 10);
    long const depth = strtol(words[4], NULL, 10);
    nk_size_t const size = (nk_size_t)labs(depth);
    void *const queries =
        nk_packed_of_(dtype, nk_exact_k, nk_tokens_(dtype, query_count, size, depth < 0), &query_count, 1, size, mask);
    void *const documents = nk_packed_of_(dtype, nk_exact_k, nk_tokens_(dtype, document_count, size, depth < 0),
                                          &document_count, 1, size, mask);
    nk_f64_t wide;
    nk_f32_t narrow;
    nk_status_t status;
    if (dtype == nk_bf16_k)
        status = nk_maxsim_packed_bf16_best(queries, documents, query_count, document_count, size, &narrow, mask, NULL);
    else if (dtype == nk_f16_k)
        status = nk_maxsim_packed_f16_best(queries, documents, query_count, document_count, size, &narrow, mask, NULL);
    else
        status = nk_maxsim_packed_f32_best(queries, documents, query_count, document_count, size, &wide, mask, NULL);
    nk_must_(status, "score");
    return 0;
}

int main(int count, char **words) {
    if (count == 3 && strcmp(words[1], "same") == 0) return nk_same_(nk_exact_k, words[2]);
    if (count == 4 && strcmp(words[1], "same") == 0)
        return nk_same_((nk_precision_t)strtoul(words[3], NULL, 10), words[2]);
    if (count == 7 && strcmp(words[1], "work") == 0) return nk_work_(words + 2);
    return 2;
}
