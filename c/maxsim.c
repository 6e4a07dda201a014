/* maxsim.c: the public entry points. They validate, read the header, and call the row; no instruction set is named. */
#include <numkong/backend.h>

#include <string.h>

/* X(status, sentence): names come from the enumerators. */
#define NK_STATUSES(X)                                                                                                 \
    X(success, "done")                                                                                                 \
    X(bad_alloc, "scratch memory could not be allocated; free memory or score fewer queries in one call")              \
    X(unexpected_dimensions, "counts or depth differ from what the packed buffers hold")                               \
    X(missing_gpu, "no CUDA device is present")                                                                        \
    X(device_code, "a stream was given to a CPU row; pass a null stream")                                              \
    X(device_memory, "the memory is not reachable from the device that was asked to work on it")                       \
    X(missing_kernel, "no row of this build has the dtype within the given capabilities")                              \
    X(misaligned, "a packed buffer must start on a multiple of 16 bytes")                                              \
    X(pack_mismatch,                                                                                                   \
      "the buffer was packed by another row or for another dtype, or its header is damaged; pack again")               \
    X(missing_library, "a library that the row needs is not installed")                                                \
    X(null_argument, "a required pointer is null")                                                                     \
    X(size_overflow, "the sizes do not fit in the address space; split the collection")                                \
    X(unknown_metric, "the metric is none of dot, cosine and angular")                                                 \
    X(index_out_of_range, "a query or document index lies outside the packed collection")                              \
    X(bad_capability_name, "NUMKONG_CAPABILITIES names a capability or row that does not exist")

char const *nk_status_name(nk_status_t status) {
    switch (status) {
#define NK_NAME_(name, sentence)                                                                                       \
    case nk_##name##_k: return #name;
        NK_STATUSES(NK_NAME_)
#undef NK_NAME_
    default: return "unknown_status";
    }
}

char const *nk_status_sentence(nk_status_t status) {
    switch (status) {
#define NK_SENTENCE_(name, sentence)                                                                                   \
    case nk_##name##_k: return sentence;
        NK_STATUSES(NK_SENTENCE_)
#undef NK_SENTENCE_
    default: return "this status is not one of the library's";
    }
}

nk_dtype_t nk_maxsim_output_dtype(nk_dtype_t dtype) {
    if (dtype == nk_f32_k) return nk_f64_k;
    return dtype == nk_bf16_k || dtype == nk_f16_k ? nk_f32_k : nk_dtype_unknown_k;
}

nk_f64_t nk_maxsim_error_bound(nk_dtype_t dtype) {
    switch (nk_maxsim_output_dtype(dtype)) {
    case nk_f64_k: return 0x1p-51;
    case nk_f32_k: return 0x1p-22;
    default: return 0;
    }
}

/* The row that a call runs on: the best within the mask and the machine, on no stream. */
static nk_status_t nk_select_(nk_dtype_t dtype, nk_capability_t capabilities, nk_stream_t stream,
                              nk_backend_t const **backend) {
    *backend = nk_backend_best(dtype, capabilities & nk_cpu_capabilities_detected());
    if (!*backend) return nk_missing_kernel_k;
    return stream ? nk_device_code_k : nk_success_k;
}

/* A checked buffer of this very row and dtype, exact or coded. */
static nk_status_t nk_expect_any_(void const *packed, nk_backend_t const *backend, nk_dtype_t dtype) {
    nk_status_t const status = nk_packed_check(packed, UINT64_MAX);
    if (status == nk_missing_kernel_k) return nk_pack_mismatch_k;
    if (status != nk_success_k) return status;
    nk_packed_header_t const *header = (nk_packed_header_t const *)packed;
    return header->layout == backend->layout && header->dtype == (nk_u32_t)dtype ? nk_success_k : nk_pack_mismatch_k;
}

/* The same, with its tokens as they were given. */
static nk_status_t nk_expect_(void const *packed, nk_backend_t const *backend, nk_dtype_t dtype) {
    nk_status_t const status = nk_expect_any_(packed, backend, dtype);
    if (status != nk_success_k) return status;
    return nk_packed_coding(packed).precision == nk_exact_k ? nk_success_k : nk_pack_mismatch_k;
}

static nk_status_t nk_pack_size_(nk_dtype_t dtype, nk_size_t documents, nk_size_t tokens, nk_size_t depth,
                                 nk_capability_t capabilities, nk_size_t *bytes) {
    nk_backend_t const *backend;
    nk_packed_header_t header;
    if (!bytes) return nk_null_argument_k;
    nk_status_t status = nk_select_(dtype, capabilities, NULL, &backend);
    if (status != nk_success_k) return status;
    status = nk_packed_describe(backend, dtype, NULL, documents, tokens, depth, &header);
    if (status == nk_success_k) *bytes = header.total_bytes;
    return status;
}

static nk_status_t nk_packed_shape_(nk_dtype_t dtype, void const *packed, nk_size_t *vectors, nk_size_t *depth,
                                    nk_capability_t capabilities, nk_stream_t stream) {
    nk_backend_t const *backend;
    if (!vectors || !depth) return nk_null_argument_k;
    nk_status_t status = nk_select_(dtype, capabilities, stream, &backend);
    if (status == nk_success_k) status = nk_expect_any_(packed, backend, dtype);
    if (status != nk_success_k) return status;
    *vectors = ((nk_packed_header_t const *)packed)->tokens;
    *depth = ((nk_packed_header_t const *)packed)->depth;
    return nk_success_k;
}

/* Runs that hold the tokens of all documents. */
static nk_status_t nk_check_collection_(nk_maxsim_pack_t const *job, nk_u64_t *total) {
    nk_token_runs_t const *runs = &job->tokens;
    nk_u64_t tokens = 0;
    if (!job->offsets) return nk_null_argument_k;
    if (runs->runs && (!runs->pointers || !runs->counts || !runs->row_strides || !runs->element_strides))
        return nk_null_argument_k;
    for (nk_size_t run = 0; run != runs->runs; ++run) {
        if (runs->counts[run] && job->depth && !runs->pointers[run]) return nk_null_argument_k;
        if (runs->counts[run] > UINT64_MAX - tokens) return nk_size_overflow_k;
        tokens += runs->counts[run];
    }
    if (job->offsets[0] || job->offsets[job->documents] != tokens) return nk_unexpected_dimensions_k;
    for (nk_size_t document = 0; document != job->documents; ++document)
        if (job->offsets[document] > job->offsets[document + 1]) return nk_unexpected_dimensions_k;
    *total = tokens;
    return nk_success_k;
}

static nk_status_t nk_pack_corpus_(nk_dtype_t dtype, nk_coding_t const *coding, nk_maxsim_pack_t const *job,
                                   nk_capability_t capabilities, nk_stream_t stream) {
    nk_backend_t const *backend;
    nk_packed_header_t header;
    nk_u64_t tokens;
    if (!job || !job->packed || !job->offsets) return nk_null_argument_k;
    if ((uintptr_t)job->packed % nk_packed_base_alignment_k) return nk_misaligned_k;
    nk_status_t status = nk_select_(dtype, capabilities, stream, &backend);
    if (status == nk_success_k) status = nk_check_collection_(job, &tokens);
    if (status != nk_success_k) return status;
    status = nk_packed_describe(backend, dtype, coding, job->documents, tokens, job->depth, &header);
    return status == nk_success_k ? backend->kernels->pack(job, &header) : status;
}

static nk_status_t nk_pack_(nk_dtype_t dtype, void const *vectors, nk_size_t vector_count, nk_size_t depth,
                            nk_size_t stride, void *packed, nk_capability_t capabilities, nk_stream_t stream) {
    nk_u64_t const pointer = (nk_u64_t)(uintptr_t)vectors, offsets[2] = {0, vector_count};
    nk_i64_t const row_stride = (nk_i64_t)stride, element_stride = (nk_i64_t)nk_dtype_bytes(dtype);
    nk_maxsim_pack_t const job = {
        {1, &pointer, &vector_count, &row_stride, &element_stride}, offsets, 1, depth, 0, packed};
    if (stride < depth * nk_dtype_bytes(dtype) && vector_count > 1) return nk_unexpected_dimensions_k;
    return nk_pack_corpus_(dtype, NULL, &job, capabilities, stream);
}

/* Candidates in range, and the offsets of just their documents: a rerank must not walk the whole collection. */
static nk_status_t nk_check_candidates_(nk_maxsim_corpus_t const *job, nk_u64_t const *offsets, nk_size_t documents,
                                        nk_u64_t tokens) {
    nk_size_t const count = (job->query_end - job->query_begin) * job->candidate_count;
    for (nk_size_t index = 0; index != count; ++index) {
        nk_i64_t const candidate = job->candidates[index];
        if (candidate == -1) continue;
        if (candidate < -1 || candidate >= (nk_i64_t)documents) return nk_index_out_of_range_k;
        if (offsets[candidate] > offsets[candidate + 1] || offsets[candidate + 1] > tokens) return nk_pack_mismatch_k;
    }
    return nk_success_k;
}

static nk_status_t nk_check_documents_(nk_maxsim_corpus_t const *job, nk_packed_header_t const *documents) {
    if (((nk_packed_header_t const *)job->queries)->depth != documents->depth) return nk_unexpected_dimensions_k;
    if (!job->candidates) return nk_packed_check_offsets(documents, job->document_begin, job->document_end);
    return nk_check_candidates_(job, nk_packed_offsets(documents), documents->documents, documents->tokens);
}

/* Documents as arrays, where they can be read in place. */
static nk_status_t nk_check_arrays_(nk_dtype_t dtype, nk_maxsim_corpus_t const *job) {
    nk_maxsim_pack_t const *const arrays = job->arrays;
    nk_token_runs_t const *const runs = &arrays->tokens;
    nk_i64_t const element_bytes = (nk_i64_t)nk_dtype_bytes(dtype);
    nk_u64_t tokens;
    nk_status_t const status = nk_check_collection_(arrays, &tokens);
    if (status != nk_success_k) return status;
    if (arrays->depth != ((nk_packed_header_t const *)job->queries)->depth || arrays->normalize || job->documents)
        return nk_unexpected_dimensions_k;
    for (nk_size_t run = 0; run != runs->runs; ++run) {
        if (runs->pointers[run] % (nk_u64_t)element_bytes || runs->row_strides[run] % element_bytes)
            return nk_misaligned_k;
        if (runs->counts[run] && arrays->depth > 1 && runs->element_strides[run] != element_bytes)
            return nk_unexpected_dimensions_k;
    }
    if (job->candidates) return nk_check_candidates_(job, arrays->offsets, arrays->documents, tokens);
    if (job->document_begin > job->document_end || job->document_end > arrays->documents)
        return nk_index_out_of_range_k;
    return nk_success_k;
}

static nk_status_t nk_corpus_(nk_dtype_t dtype, nk_maxsim_corpus_t const *job, nk_capability_t capabilities,
                              nk_stream_t stream) {
    nk_backend_t const *backend;
    if (!job) return nk_null_argument_k;
    nk_status_t status = nk_select_(dtype, capabilities, stream, &backend);
    if (status == nk_success_k && !job->arrays) status = nk_expect_any_(job->documents, backend, dtype);
    if (status != nk_success_k) return status;
    int const coded = !job->arrays && nk_packed_coding(job->documents).precision != nk_exact_k;
    status = coded ? nk_expect_any_(job->queries, backend, dtype) : nk_expect_(job->queries, backend, dtype);
    if (status != nk_success_k) return status;

    if (job->metric > nk_metric_angular_k) return nk_unknown_metric_k;
    status = nk_packed_check_offsets(job->queries, job->query_begin, job->query_end);
    if (status == nk_success_k)
        status = job->arrays ? nk_check_arrays_(dtype, job) : nk_check_documents_(job, job->documents);
    if (status != nk_success_k) return status;

    nk_size_t const columns = job->candidates ? job->candidate_count : job->document_end - job->document_begin;
    if (columns == 0 || job->query_begin == job->query_end) return nk_success_k;
    if (!job->scores) return nk_null_argument_k;
    if (job->score_stride < columns) return nk_unexpected_dimensions_k;
    if (job->argmax || job->token_scores) {
        nk_u64_t const *offsets = nk_packed_offsets(job->queries);
        for (nk_size_t query = job->query_begin; query != job->query_end; ++query)
            if (job->token_stride < offsets[query + 1] - offsets[query]) return nk_unexpected_dimensions_k;
    }
    return coded ? backend->kernels->coded(job) : backend->kernels->corpus(job);
}

static nk_status_t nk_packed_(nk_dtype_t dtype, void const *query_packed, void const *document_packed,
                              nk_size_t query_count, nk_size_t document_count, nk_size_t depth, void *result,
                              nk_capability_t capabilities, nk_stream_t stream) {
    nk_backend_t const *backend;
    if (!result) return nk_null_argument_k;
    nk_status_t status = nk_select_(dtype, capabilities, stream, &backend);
    if (status == nk_success_k) status = nk_expect_(query_packed, backend, dtype);
    if (status == nk_success_k) status = nk_expect_(document_packed, backend, dtype);
    if (status != nk_success_k) return status;

    nk_packed_header_t const *queries = (nk_packed_header_t const *)query_packed;
    nk_packed_header_t const *documents = (nk_packed_header_t const *)document_packed;
    if (queries->documents != 1 || documents->documents != 1) return nk_unexpected_dimensions_k;
    if (queries->tokens != query_count || documents->tokens != document_count) return nk_unexpected_dimensions_k;
    if (queries->depth != depth || documents->depth != depth) return nk_unexpected_dimensions_k;
    nk_maxsim_corpus_t job = {0};
    job.queries = query_packed;
    job.documents = document_packed;
    job.query_end = job.document_end = job.score_stride = 1;
    job.metric = nk_metric_angular_k; /* what NumKong's function of this name returns */
    job.scores = result;
    return nk_corpus_(dtype, &job, capabilities, stream);
}

static nk_status_t nk_unpack_(nk_dtype_t dtype, void const *packed, nk_size_t token_begin, nk_size_t token_end,
                              void *vectors, nk_capability_t capabilities, nk_stream_t stream) {
    nk_backend_t const *backend;
    nk_status_t status = nk_select_(dtype, capabilities, stream, &backend);
    if (status == nk_success_k) status = nk_expect_(packed, backend, dtype);
    if (status != nk_success_k) return status;
    nk_packed_header_t const *header = (nk_packed_header_t const *)packed;
    if (token_begin > token_end || token_end > header->tokens) return nk_index_out_of_range_k;
    nk_size_t const token_bytes = header->depth * nk_dtype_bytes(dtype);
    if (token_bytes == 0 || token_begin == token_end) return nk_success_k;
    if (!vectors) return nk_null_argument_k;
    memcpy(vectors, nk_packed_originals(packed) + token_begin * token_bytes, (token_end - token_begin) * token_bytes);
    return nk_success_k;
}

#define NK_MAXSIM_DEFINE_(dtype, output)                                                                               \
    nk_status_t nk_maxsim_pack_size_##dtype##_best(nk_size_t vector_count, nk_size_t depth,                            \
                                                   nk_capability_t capabilities, nk_size_t *bytes) {                   \
        return nk_pack_size_(nk_##dtype##_k, 1, vector_count, depth, capabilities, bytes);                             \
    }                                                                                                                  \
    nk_status_t nk_maxsim_packed_shape_##dtype##_best(void const *packed, nk_size_t *vectors, nk_size_t *depth,        \
                                                      nk_capability_t capabilities, nk_stream_t stream) {              \
        return nk_packed_shape_(nk_##dtype##_k, packed, vectors, depth, capabilities, stream);                         \
    }                                                                                                                  \
    nk_status_t nk_maxsim_pack_##dtype##_best(nk_##dtype##_t const *vectors, nk_size_t vector_count, nk_size_t depth,  \
                                              nk_size_t stride, void *packed, nk_capability_t capabilities,            \
                                              nk_stream_t stream) {                                                    \
        return nk_pack_(nk_##dtype##_k, vectors, vector_count, depth, stride, packed, capabilities, stream);           \
    }                                                                                                                  \
    nk_status_t nk_maxsim_packed_##dtype##_best(void const *query_packed, void const *document_packed,                 \
                                                nk_size_t query_count, nk_size_t document_count, nk_size_t depth,      \
                                                output *result, nk_capability_t capabilities, nk_stream_t stream) {    \
        return nk_packed_(nk_##dtype##_k, query_packed, document_packed, query_count, document_count, depth, result,   \
                          capabilities, stream);                                                                       \
    }                                                                                                                  \
    nk_status_t nk_maxsim_pack_corpus_size_##dtype##_best(nk_size_t documents, nk_size_t tokens, nk_size_t depth,      \
                                                          nk_capability_t capabilities, nk_size_t *bytes) {            \
        return nk_pack_size_(nk_##dtype##_k, documents, tokens, depth, capabilities, bytes);                           \
    }                                                                                                                  \
    nk_status_t nk_maxsim_pack_corpus_##dtype##_best(nk_maxsim_pack_t const *job, nk_capability_t capabilities,        \
                                                     nk_stream_t stream) {                                             \
        return nk_pack_corpus_(nk_##dtype##_k, NULL, job, capabilities, stream);                                       \
    }                                                                                                                  \
    nk_status_t nk_maxsim_corpus_##dtype##_best(nk_maxsim_corpus_t const *job, nk_capability_t capabilities,           \
                                                nk_stream_t stream) {                                                  \
        return nk_corpus_(nk_##dtype##_k, job, capabilities, stream);                                                  \
    }                                                                                                                  \
    nk_status_t nk_maxsim_unpack_##dtype##_best(void const *packed, nk_size_t token_begin, nk_size_t token_end,        \
                                                nk_##dtype##_t *vectors, nk_capability_t capabilities,                 \
                                                nk_stream_t stream) {                                                  \
        return nk_unpack_(nk_##dtype##_k, packed, token_begin, token_end, vectors, capabilities, stream);              \
    }
NK_MAXSIM_DEFINE_(bf16, nk_f32_t)
NK_MAXSIM_DEFINE_(f16, nk_f32_t)
NK_MAXSIM_DEFINE_(f32, nk_f64_t)

nk_status_t nk_maxsim_pack_coded(nk_dtype_t dtype, nk_coding_t const *coding, nk_maxsim_pack_t const *job,
                                 nk_capability_t capabilities, nk_stream_t stream) {
    if (!coding) return nk_null_argument_k;
    if (coding->precision == nk_exact_k || coding->precision >= nk_residual_k) return nk_missing_kernel_k;
    return nk_pack_corpus_(dtype, coding, job, capabilities, stream);
}

nk_status_t nk_maxsim_decode(void const *packed, nk_size_t token_begin, nk_size_t token_end, nk_f32_t *vectors) {
    nk_status_t const status = nk_packed_check(packed, UINT64_MAX);
    if (status != nk_success_k) return status;
    nk_packed_header_t const *header = (nk_packed_header_t const *)packed;
    if (nk_packed_coding(packed).precision == nk_exact_k) return nk_pack_mismatch_k;
    if (token_begin > token_end || token_end > header->tokens) return nk_index_out_of_range_k;
    if (header->depth == 0 || token_begin == token_end) return nk_success_k;
    if (!vectors) return nk_null_argument_k;
    nk_backend_t const *backend = nk_backend_by_layout(header->layout);
    if (backend->required & ~nk_cpu_capabilities_detected()) return nk_missing_kernel_k;
    backend->kernels->decode(packed, token_begin, token_end, vectors);
    return nk_success_k;
}

/* Callers pass the returned bits as the mask of the kernel's own calls, so the same row packs and scores. */
nk_status_t nk_maxsim_find_kernel(nk_kernel_kind_t kind, nk_dtype_t dtype, nk_capability_t capabilities,
                                  nk_kernel_punned_t *kernel, nk_capability_t *capability) {
    if (!kernel || !capability) return nk_null_argument_k;
    nk_backend_t const *backend = nk_backend_best(dtype, capabilities & nk_cpu_capabilities_detected());
    if (!backend || kind <= nk_kernel_unknown_k || kind > nk_kernel_maxsim_unpack_k) return nk_missing_kernel_k;
#define NK_KIND_ROW_(dtype)                                                                                            \
    {                                                                                                                  \
        (nk_kernel_punned_t) & nk_maxsim_pack_size_##dtype##_best,                                                     \
            (nk_kernel_punned_t) & nk_maxsim_packed_shape_##dtype##_best,                                              \
            (nk_kernel_punned_t) & nk_maxsim_pack_##dtype##_best,                                                      \
            (nk_kernel_punned_t) & nk_maxsim_packed_##dtype##_best,                                                    \
            (nk_kernel_punned_t) & nk_maxsim_corpus_##dtype##_best,                                                    \
            (nk_kernel_punned_t) & nk_maxsim_unpack_##dtype##_best                                                     \
    }
    static nk_kernel_punned_t const kernels[3][6] = {NK_KIND_ROW_(bf16), NK_KIND_ROW_(f16), NK_KIND_ROW_(f32)};
#undef NK_KIND_ROW_
    int const row = dtype == nk_bf16_k ? 0 : dtype == nk_f16_k ? 1 : 2;
    *kernel = kernels[row][kind - nk_kernel_maxsim_pack_size_k];
    *capability = backend->required;
    return nk_success_k;
}
