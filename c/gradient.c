/* gradient.c: entry points of the backward passes and of the nearest neighbours. They validate and call the row. */
#include <numkong/backend.h>

static nk_status_t nk_check_sets_(nk_token_sets_t const *sets) {
    if (!sets->offsets) return nk_null_argument_k;
    if (sets->offsets[0]) return nk_unexpected_dimensions_k;
    for (nk_size_t set = 0; set != sets->sets; ++set)
        if (sets->offsets[set] > sets->offsets[set + 1]) return nk_unexpected_dimensions_k;
    return sets->tokens || !sets->offsets[sets->sets] ? nk_success_k : nk_null_argument_k;
}

/* The row that runs: a row without passes of its own leaves them to the portable one, whose bits are the same. */
static nk_backend_t const *nk_best_(nk_u32_t dtype, nk_capability_t capabilities) {
    nk_backend_t const *const best = nk_backend_best((nk_dtype_t)dtype, capabilities & nk_cpu_capabilities_detected());
    if (!best || best->kernels->gradient) return best;
    return nk_backend_best((nk_dtype_t)dtype, NK_CAP(serial));
}

nk_status_t nk_maxsim_gradient(nk_maxsim_gradient_t const *job, nk_capability_t capabilities) {
    if (!job) return nk_null_argument_k;
    nk_backend_t const *const backend = nk_best_(job->dtype, capabilities);
    if (!backend) return nk_missing_kernel_k;
    if (job->gradient_dtype != nk_f32_k && job->gradient_dtype != job->dtype) return nk_missing_kernel_k;
    if (job->metric > nk_metric_angular_k) return nk_unknown_metric_k;
    nk_status_t status = nk_check_sets_(&job->queries);
    if (status == nk_success_k) status = nk_check_sets_(&job->documents);
    if (status != nk_success_k) return status;

    nk_size_t const most = job->of_documents ? job->documents.sets : job->queries.offsets[job->queries.sets];
    if (job->begin > job->end || job->end > most || job->depth == 0) return nk_unexpected_dimensions_k;
    if (job->begin == job->end) return nk_success_k;
    if (!job->gradient) return nk_null_argument_k;
    if (job->columns && job->queries.sets && (!job->upstream || !job->argmax)) return nk_null_argument_k;
    if (!job->candidates && job->columns != job->documents.sets) return nk_unexpected_dimensions_k;
    if (job->candidates && job->of_documents && (!job->listing_offsets || !job->listing)) return nk_null_argument_k;
    if (job->metric != nk_metric_dot_k && (!job->queries.squares || !job->documents.squares)) return nk_null_argument_k;
    for (nk_size_t set = 0; set != job->queries.sets; ++set)
        if (job->queries.offsets[set + 1] - job->queries.offsets[set] > job->token_stride)
            return nk_unexpected_dimensions_k;
    if (job->candidates)
        for (nk_size_t index = 0; index != job->queries.sets * job->columns; ++index)
            if (job->candidates[index] < -1 || job->candidates[index] >= (nk_i64_t)job->documents.sets)
                return nk_index_out_of_range_k;
    return backend->kernels->gradient(job);
}

nk_status_t nk_nearest(nk_nearest_t const *job, nk_capability_t capabilities) {
    if (!job) return nk_null_argument_k;
    nk_backend_t const *const backend = nk_best_(job->dtype, capabilities);
    if (!backend) return nk_missing_kernel_k;
    nk_status_t status = nk_check_sets_(&job->points);
    if (status == nk_success_k) status = nk_check_sets_(&job->others);
    if (status != nk_success_k) return status;
    if (job->points.sets != job->others.sets || job->depth == 0) return nk_unexpected_dimensions_k;
    if (job->begin > job->end || job->end > job->points.offsets[job->points.sets]) return nk_index_out_of_range_k;
    if (job->begin == job->end) return nk_success_k;
    if (!job->nearest || !job->squares) return nk_null_argument_k;
    return backend->kernels->nearest(job);
}

nk_status_t nk_token_squares(nk_dtype_t dtype, void const *tokens, nk_size_t count, nk_size_t depth, nk_f64_t *squares,
                             nk_capability_t capabilities) {
    nk_backend_t const *const backend = nk_best_((nk_u32_t)dtype, capabilities);
    if (!backend) return nk_missing_kernel_k;
    if (count == 0) return nk_success_k;
    if (!tokens || !squares) return nk_null_argument_k;
    return backend->kernels->squares(dtype, tokens, count, depth, squares);
}
