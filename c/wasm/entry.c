/* entry.c: what the WebAssembly module exports. Arguments are i32 and f64 only, so that a host needs neither the layout
 * of a C structure nor 64-bit integers; counts come as f64, which holds every size that the packed format allows.
 * Memory is the module's own and grows; there are no imports. */
#include <numkong/backend.h>

#include <stdlib.h>

#define NK_EXPORT(name) __attribute__((export_name(#name)))

/* A count that JavaScript gave; nonsense becomes one that overflows. */
static nk_size_t nk_count_(nk_f64_t count) { return count >= 0 && count <= 0x1p53 ? (nk_size_t)count : UINT64_MAX; }

static nk_capability_t nk_mask_(nk_u32_t layout) {
    nk_backend_t const *backend = nk_backend_by_layout(layout);
    return backend && backend->kernels ? backend->required : 0;
}

/* Memory on a boundary of 64 bytes; null when there is not enough. */
NK_EXPORT(nk_wasm_allocate) void *nk_wasm_allocate(nk_f64_t bytes) {
    nk_size_t const rounded = (nk_count_(bytes) | 63) + 1;
    return rounded == 0 || rounded != (size_t)rounded ? NULL : aligned_alloc(64, (size_t)rounded);
}
NK_EXPORT(nk_wasm_release) void nk_wasm_release(void *memory) { free(memory); }

/* Layout id of the best row that this engine can run for a dtype, 0 when there is none. */
NK_EXPORT(nk_wasm_best_row) nk_u32_t nk_wasm_best_row(nk_u32_t dtype) {
    nk_backend_t const *backend = nk_backend_best((nk_dtype_t)dtype, nk_cpu_capabilities_detected());
    return backend ? backend->layout : 0;
}
NK_EXPORT(nk_wasm_row_name) char const *nk_wasm_row_name(nk_u32_t layout) {
    nk_backend_t const *backend = nk_backend_by_layout(layout);
    return backend ? backend->name : NULL;
}
NK_EXPORT(nk_wasm_status_name) char const *nk_wasm_status_name(nk_i32_t status) {
    return nk_status_name((nk_status_t)status);
}
NK_EXPORT(nk_wasm_status_sentence) char const *nk_wasm_status_sentence(nk_i32_t status) {
    return nk_status_sentence((nk_status_t)status);
}

/* Bytes that a packed collection takes; a status, negative, when it cannot be. */
NK_EXPORT(nk_wasm_pack_size)
nk_f64_t nk_wasm_pack_size(nk_u32_t layout, nk_u32_t dtype, nk_f64_t documents, nk_f64_t tokens, nk_f64_t depth) {
    nk_backend_t const *backend = nk_backend_best((nk_dtype_t)dtype, nk_mask_(layout));
    nk_packed_header_t header;
    if (!backend || backend->layout != layout) return nk_missing_kernel_k;
    nk_status_t const status = nk_packed_describe(backend, (nk_dtype_t)dtype, NULL, nk_count_(documents),
                                                  nk_count_(tokens), nk_count_(depth), &header);
    return status == nk_success_k ? (nk_f64_t)header.total_bytes : status;
}

/* Packs tokens that lie one behind the other; offsets are documents + 1 u64. */
NK_EXPORT(nk_wasm_pack)
nk_i32_t nk_wasm_pack(nk_u32_t layout, nk_u32_t dtype, void const *vectors, nk_u64_t const *offsets, nk_u32_t documents,
                      nk_u32_t depth, nk_u32_t normalize, void *packed) {
    nk_size_t const element_bytes = nk_dtype_bytes((nk_dtype_t)dtype);
    if (!offsets) return nk_null_argument_k;
    nk_u64_t const pointer = (nk_u64_t)(uintptr_t)vectors, tokens = offsets[documents];
    nk_i64_t const row_stride = (nk_i64_t)(depth * element_bytes), element_stride = (nk_i64_t)element_bytes;
    nk_maxsim_pack_t const job = {
        {1, &pointer, &tokens, &row_stride, &element_stride}, offsets, documents, depth, normalize, packed};
    switch (dtype) {
    case nk_bf16_k: return nk_maxsim_pack_corpus_bf16_best(&job, nk_mask_(layout), NULL);
    case nk_f16_k: return nk_maxsim_pack_corpus_f16_best(&job, nk_mask_(layout), NULL);
    case nk_f32_k: return nk_maxsim_pack_corpus_f32_best(&job, nk_mask_(layout), NULL);
    default: return nk_missing_kernel_k;
    }
}

/* Whether `bytes` at `packed` are an intact collection of a row in this module. */
NK_EXPORT(nk_wasm_check) nk_i32_t nk_wasm_check(void const *packed, nk_f64_t bytes) {
    nk_status_t const status = nk_packed_check(packed, nk_count_(bytes));
    if (status != nk_success_k) return status;
    return nk_packed_check_offsets(packed, 0, ((nk_packed_header_t const *)packed)->documents);
}

/* Scores query sets [query_begin, query_end) against documents [document_begin, document_end): scores [sets][documents]
 * in the output type; bounds (f64), argmax (i32) and token_scores (output type) are optional, the last two have
 * token_stride elements for every score. */
NK_EXPORT(nk_wasm_score)
nk_i32_t nk_wasm_score(void const *queries, void const *documents, nk_u32_t query_begin, nk_u32_t query_end,
                       nk_u32_t document_begin, nk_u32_t document_end, nk_u32_t metric, nk_u32_t mean, void *scores,
                       nk_f64_t *bounds, nk_i32_t *argmax, void *token_scores, nk_u32_t token_stride) {
    nk_packed_header_t const *const header = (nk_packed_header_t const *)documents;
    if (!documents) return nk_null_argument_k;
    nk_maxsim_corpus_t job = {0};
    job.queries = queries;
    job.documents = documents;
    job.query_begin = query_begin;
    job.query_end = query_end;
    job.document_begin = document_begin;
    job.document_end = document_end;
    job.metric = metric;
    job.mean = mean;
    job.scores = scores;
    job.bounds = bounds;
    job.argmax = argmax;
    job.token_scores = token_scores;
    job.score_stride = document_end - document_begin;
    job.token_stride = token_stride;
    switch (header->dtype) {
    case nk_bf16_k: return nk_maxsim_corpus_bf16_best(&job, nk_mask_(header->layout), NULL);
    case nk_f16_k: return nk_maxsim_corpus_f16_best(&job, nk_mask_(header->layout), NULL);
    case nk_f32_k: return nk_maxsim_corpus_f32_best(&job, nk_mask_(header->layout), NULL);
    default: return nk_pack_mismatch_k;
    }
}
