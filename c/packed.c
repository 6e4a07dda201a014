/* packed.c: the header and the regions behind it, computed by one function for size, pack, score and unpack. */
#include <numkong/backend.h>

#include <string.h>

nk_size_t nk_dtype_bytes(nk_dtype_t dtype) {
    switch (dtype) {
    case nk_f64_k: return 8;
    case nk_f32_k: return 4;
    case nk_f16_k:
    case nk_bf16_k: return 2;
    default: return 0;
    }
}

typedef char nk_header_size_is_fixed_[sizeof(nk_packed_header_t) == nk_packed_header_bytes_k ? 1 : -1];

/* FNV-1a over 64-bit words: cheap enough for every call, and any flipped bit changes it. */
static nk_u64_t nk_header_checksum_(nk_packed_header_t const *header) {
    nk_u64_t words[nk_packed_header_bytes_k / 8], hash = 0xcbf29ce484222325ull;
    memcpy(words, header, sizeof(words));
    for (int index = 0; index != nk_packed_header_bytes_k / 8 - 1; ++index)
        hash = (hash ^ words[index]) * 0x100000001b3ull, hash ^= hash >> 29;
    return hash;
}

/* Appends a region of count x bytes and returns where it starts; *overflow is set when 64 bits do not hold it. */
static nk_u64_t nk_append_region_(nk_u64_t *end, nk_u64_t count, nk_u64_t bytes, int *overflow) {
    nk_u64_t const start = (*end + nk_packed_alignment_k - 1) / nk_packed_alignment_k * nk_packed_alignment_k;
    nk_u64_t const limit = (nk_u64_t)1 << 62;
    if (*overflow || (bytes && count > (limit - start) / bytes)) {
        *overflow = 1;
        return 0;
    }
    *end = start + count * bytes;
    return start;
}

/* Regions of an exact packing. Metadata of the last tile is read whole, so its arrays are as long as the tiles are. */
static void nk_append_exact_(nk_backend_t const *backend, nk_packed_header_t *header, nk_u64_t *end, int *overflow) {
    nk_u64_t const tile = backend->kernels->tile_tokens, tiles = tile ? (header->tokens + tile - 1) / tile : 0;
    nk_u64_t const element_bytes = nk_dtype_bytes((nk_dtype_t)header->dtype);
    header->square_at = nk_append_region_(end, header->tokens, sizeof(nk_f64_t), overflow);
    header->scale_at = nk_append_region_(end, tiles * tile, sizeof(nk_f32_t), overflow);
    header->residual_at = nk_append_region_(end, tiles * tile, sizeof(nk_f32_t), overflow);
    header->reach_at = nk_append_region_(end, tiles * tile, sizeof(nk_f32_t), overflow);
    header->screen_at = nk_append_region_(end, tiles * tile * 4, (header->depth + 3) / 4, overflow);
    header->originals_at = nk_append_region_(end, header->tokens * element_bytes, header->depth, overflow);
}

/* Bytes of a token's codes in the plane. */
static nk_u64_t nk_code_bytes_(nk_coding_t const *coding, nk_u64_t depth) {
    nk_u64_t const steps = (depth + 3) / 4;
    switch (coding->precision) {
    case nk_binary_k: return (depth + 7) / 8;
    case nk_residual_k: return (steps * coding->bits + 1) / 2;
    default: return steps * 4;
    }
}

/* 1 when there is such a coding. */
static int nk_is_coding_(nk_coding_t const *coding, nk_u64_t depth) {
    nk_u32_t const bits = coding->bits;
    if (coding->precision > nk_residual_k || depth > nk_coded_depth_max_k) return 0;
    if (coding->precision != nk_residual_k) return bits == 0 && coding->centroids == 0;
    return (bits == 1 || bits == 2 || bits == 4 || bits == 8) && coding->centroids && coding->centroids <= UINT32_MAX;
}

/* Regions of a coded packing. Metadata and codes of the last tile are read whole, so its lanes are there. */
static void nk_append_coded_(nk_backend_t const *backend, nk_coding_t const *coding, nk_packed_header_t *header,
                             nk_u64_t *end, int *overflow) {
    nk_u64_t const tile = coding->precision == nk_binary_k ? nk_binary_tile_tokens_k : backend->kernels->coded_tokens;
    nk_u64_t const padded = (header->tokens + tile - 1) / tile * tile;
    int const normed = coding->precision == nk_int8_k || coding->precision == nk_fp8_k;
    int const residual = coding->precision == nk_residual_k;
    nk_u64_t const codebook = nk_codebook_head_bytes_k + coding->centroids * ((header->depth + 3) / 4) * 4;
    header->flags = coding->precision | coding->bits << 8;
    header->centroids = coding->centroids;
    header->tile_tokens = (nk_u32_t)tile;
    header->code_bias = backend->kernels->coded_bias;
    header->code_bytes = nk_code_bytes_(coding, header->depth);
    header->scale_at = nk_append_region_(end, padded, sizeof(nk_f32_t), overflow);
    header->inverse_norm_at = nk_append_region_(end, normed ? padded : 0, sizeof(nk_f32_t), overflow);
    header->screen_at = nk_append_region_(end, padded, header->code_bytes, overflow);
    header->ids_at = nk_append_region_(end, residual ? padded : 0, sizeof(nk_u32_t), overflow);
    header->codebook_at = nk_append_region_(end, residual ? codebook : 0, 1, overflow);
    header->originals_at = nk_append_region_(end, 0, 0, overflow);
    header->square_at = header->residual_at = header->reach_at = header->originals_at; /* none */
}

nk_status_t nk_packed_describe(nk_backend_t const *backend, nk_dtype_t dtype, nk_coding_t const *coding,
                               nk_size_t documents, nk_size_t tokens, nk_size_t depth, nk_packed_header_t *header) {
    nk_u64_t const limit = (nk_u64_t)1 << 48;
    if (!backend || !backend->kernels) return nk_missing_kernel_k;
    if (documents > limit || tokens > limit || depth > limit) return nk_size_overflow_k;
    int const coded = coding && coding->precision != nk_exact_k;
    if (coding && !nk_is_coding_(coding, coded ? depth : 0)) return nk_unexpected_dimensions_k;

    nk_u64_t end = nk_packed_header_bytes_k;
    int overflow = 0;

    memset(header, 0, sizeof(*header));
    header->magic = NK_PACKED_MAGIC;
    header->version = nk_packed_version_k;
    header->layout = backend->layout;
    header->dtype = (nk_u32_t)dtype;
    header->documents = documents;
    header->tokens = tokens;
    header->depth = depth;
    header->offsets_at = nk_append_region_(&end, documents + 1, sizeof(nk_u64_t), &overflow);
    header->documents_at = nk_append_region_(&end, documents, sizeof(nk_packed_document_t), &overflow);
    if (coded)
        nk_append_coded_(backend, coding, header, &end, &overflow);
    else
        nk_append_exact_(backend, header, &end, &overflow);
    header->total_bytes = end;
    header->checksum = nk_header_checksum_(header);
    return overflow || (size_t)end != end ? nk_size_overflow_k : nk_success_k; /* an address may have 32 bits */
}

nk_status_t nk_packed_check(void const *packed, nk_size_t bytes) {
    nk_packed_header_t header, expected;
    if (!packed) return nk_null_argument_k;
    if ((uintptr_t)packed % nk_packed_base_alignment_k) return nk_misaligned_k;
    if (bytes < nk_packed_header_bytes_k) return nk_pack_mismatch_k;

    memcpy(&header, packed, sizeof(header));
    if (header.magic != NK_PACKED_MAGIC || header.version != nk_packed_version_k) return nk_pack_mismatch_k;
    if (header.checksum != nk_header_checksum_(&header)) return nk_pack_mismatch_k;
    nk_backend_t const *backend = nk_backend_by_layout(header.layout);
    if (!backend || header.dtype > 31 || !(backend->dtypes >> header.dtype & 1)) return nk_pack_mismatch_k;
    if (!backend->kernels) return nk_missing_kernel_k; /* another architecture's row packed it */
    nk_coding_t const coding = nk_packed_coding(&header);
    nk_status_t const status = nk_packed_describe(backend, (nk_dtype_t)header.dtype, &coding, header.documents,
                                                  header.tokens, header.depth, &expected);
    if (status != nk_success_k || memcmp(&header, &expected, sizeof(header))) return nk_pack_mismatch_k;
    return header.total_bytes <= bytes ? nk_success_k : nk_pack_mismatch_k;
}

nk_status_t nk_packed_check_offsets(void const *packed, nk_size_t begin, nk_size_t end) {
    nk_packed_header_t const *header = (nk_packed_header_t const *)packed;
    nk_u64_t const *offsets = nk_packed_offsets(packed);
    if (begin > end || end > header->documents) return nk_index_out_of_range_k;
    nk_u64_t previous = offsets[begin];
    for (nk_size_t document = begin; document != end; ++document) {
        if (offsets[document + 1] < previous) return nk_pack_mismatch_k;
        previous = offsets[document + 1];
    }
    return previous <= header->tokens ? nk_success_k : nk_pack_mismatch_k;
}

void nk_packed_begin(nk_maxsim_pack_t const *job, nk_packed_header_t const *header) {
    nk_u8_t *const packed = (nk_u8_t *)job->packed;
    nk_u64_t const starts[] = {header->offsets_at,  header->documents_at,    header->square_at, header->scale_at,
                               header->residual_at, header->reach_at,        header->screen_at, header->originals_at,
                               header->codebook_at, header->inverse_norm_at, header->ids_at};
    for (nk_size_t region = 0; region != sizeof(starts) / sizeof(starts[0]); ++region)
        if (starts[region]) memset(packed + starts[region] - nk_packed_alignment_k, 0, nk_packed_alignment_k);
    memcpy(packed, header, sizeof(*header));
    memset(packed, 0, sizeof(header->magic));
    memcpy(packed + header->offsets_at, job->offsets, (job->documents + 1) * sizeof(nk_u64_t));
}

void nk_packed_seal(nk_maxsim_pack_t const *job, nk_packed_header_t const *header) {
    memcpy(job->packed, header, sizeof(*header));
}
