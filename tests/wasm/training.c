/* training.c: entry points for the tests alone: gradients and nearest neighbours, which the modules do not export, by
 * the best row or by the serial one. Both sides' tokens lie one behind the other; the gradient is f32. */
#include <numkong/backend.h>

#define NK_EXPORT(name) __attribute__((export_name(#name)))

static nk_capability_t nk_mask_(nk_u32_t serial) { return serial ? NK_CAP(serial) : nk_cpu_capabilities_detected(); }

NK_EXPORT(nk_wasm_test_nearest)
nk_i32_t nk_wasm_test_nearest(nk_u32_t serial, nk_u32_t dtype, nk_u32_t depth, void const *points,
                              nk_u64_t const *point_offsets, void const *others, nk_u64_t const *other_offsets,
                              nk_u32_t sets, nk_i32_t *nearest, nk_f64_t *squares) {
    nk_nearest_t job = {0};
    job.dtype = dtype;
    job.depth = depth;
    job.points = (nk_token_sets_t){points, point_offsets, sets, NULL};
    job.others = (nk_token_sets_t){others, other_offsets, sets, NULL};
    job.end = point_offsets[sets];
    job.nearest = nearest;
    job.squares = squares;
    return nk_nearest(&job, nk_mask_(serial));
}

NK_EXPORT(nk_wasm_test_gradient)
nk_i32_t nk_wasm_test_gradient(nk_u32_t serial, nk_u32_t dtype, nk_u32_t metric, nk_u32_t of_documents, nk_u32_t depth,
                               void const *queries, nk_u64_t const *query_offsets, nk_u32_t query_sets,
                               void const *documents, nk_u64_t const *document_offsets, nk_u32_t document_sets,
                               nk_f64_t const *upstream, nk_i32_t const *argmax, nk_u32_t token_stride,
                               nk_f64_t *query_squares, nk_f64_t *document_squares, nk_f32_t *gradient) {
    nk_size_t const query_tokens = query_offsets[query_sets], document_tokens = document_offsets[document_sets];
    nk_capability_t const mask = nk_mask_(serial);
    nk_token_squares((nk_dtype_t)dtype, queries, query_tokens, depth, query_squares, mask);
    nk_token_squares((nk_dtype_t)dtype, documents, document_tokens, depth, document_squares, mask);
    nk_maxsim_gradient_t job = {0};
    job.dtype = dtype;
    job.metric = metric;
    job.of_documents = of_documents;
    job.depth = depth;
    job.queries = (nk_token_sets_t){queries, query_offsets, query_sets, query_squares};
    job.documents = (nk_token_sets_t){documents, document_offsets, document_sets, document_squares};
    job.columns = document_sets;
    job.upstream = upstream;
    job.upstream_strides[0] = document_sets;
    job.upstream_strides[1] = 1;
    job.argmax = argmax;
    job.token_stride = token_stride;
    job.end = of_documents ? document_sets : query_tokens;
    job.gradient = gradient;
    job.gradient_dtype = nk_f32_k;
    return nk_maxsim_gradient(&job, mask);
}
