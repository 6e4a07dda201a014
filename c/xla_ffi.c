/* xla_ffi.c: JAX custom calls on the host, over the same entry points as everything else.
 *
 * A call becomes units: some query sets against some columns. Whoever is free takes the next unit: the thread that XLA
 * called us on, and helpers scheduled on XLA's own pool. The caller waits only for units that were begun, never for a
 * helper that was not started, so a pool whose threads all wait in calls like this one still gets everything done.
 * Documents given as arrays are scored where they lie, so a call needs neither a copy of them nor the similarities. */
#include <numkong/backend.h>
#include <numkong/xla_ffi.h>

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#if !defined(_WIN32)
#include <unistd.h>
#endif

#if defined(_POSIX_THREADS) && _POSIX_THREADS > 0 && !defined(__wasi__)
#include <pthread.h>
#define NK_XLA_THREADS_ 1
#else
#define NK_XLA_THREADS_ 0
#endif

enum {
    nk_xla_joined_bytes_k = 1 << 20, /* of documents listed by several query sets of a unit: they stay in L2 or L3 */
    nk_xla_piece_work_k = 1 << 23,   /* multiply-adds worth handing to another thread, as in numkong_py/threads.py */
    nk_xla_unit_tokens_k = 1 << 14,
    nk_xla_units_per_thread_k = 4,
    nk_xla_gradient_work_k = 8, /* a multiply-add of a gradient, in those of a score, as in numkong_py/cpu.py */
    nk_xla_message_bytes_k = 320,
};

/* ------------------------------------------------------------------------------------------------------- the frame */

static nk_xla_error_t *nk_fail_(nk_xla_call_frame_t const *frame, int code, char const *format, ...) {
    char message[nk_xla_message_bytes_k];
    va_list values;
    va_start(values, format);
    vsnprintf(message, sizeof(message), format, values);
    va_end(values);
    nk_xla_error_create_t arguments = {sizeof(arguments), NULL, message, code};
    return frame->api->error_create(&arguments);
}

static nk_xla_error_t *nk_fail_with_status_(nk_xla_call_frame_t const *frame, nk_status_t status) {
    int const code = status == nk_bad_alloc_k ? nk_xla_resource_exhausted_k : nk_xla_invalid_argument_k;
    return nk_fail_(frame, code, "numkong_py: %s (%s)", nk_status_sentence(status), nk_status_name(status));
}

/* 1 when XLA only asks what the handler is, or is not executing yet; the question is answered. */
static int nk_not_executing_(nk_xla_call_frame_t *frame, nk_u32_t traits) {
    for (nk_xla_extension_t *found = frame->extension_start; found; found = found->next) {
        if (found->type != nk_xla_extension_metadata_k) continue;
        nk_xla_metadata_t *const metadata = ((nk_xla_metadata_extension_t *)found)->metadata;
        metadata->api_version.major_version = nk_xla_version_major_k;
        metadata->api_version.minor_version = nk_xla_version_minor_k;
        metadata->traits = traits;
        return 1;
    }
    return frame->stage != nk_xla_stage_execute_k;
}

/* Value of a scalar attribute of 64 bits; null when there is none of this name. */
static void const *nk_attribute_(nk_xla_call_frame_t const *frame, char const *name) {
    nk_xla_attributes_t const *const attributes = &frame->attributes;
    size_t const length = strlen(name);
    for (nk_i64_t index = 0; index != attributes->size; ++index) {
        nk_xla_span_t const *const span = attributes->names[index];
        if (span->len != length || memcmp(span->ptr, name, length)) continue;
        return ((nk_xla_scalar_t const *)attributes->attributes[index])->value;
    }
    return NULL;
}

static nk_i64_t nk_attribute_i64_(nk_xla_call_frame_t const *frame, char const *name) {
    void const *const value = nk_attribute_(frame, name);
    return value ? *(nk_i64_t const *)value : 0;
}

static nk_f64_t nk_attribute_f64_(nk_xla_call_frame_t const *frame, char const *name) {
    void const *const value = nk_attribute_(frame, name);
    return value ? *(nk_f64_t const *)value : 0;
}

static nk_dtype_t nk_dtype_of_(nk_xla_buffer_t const *buffer) {
    switch (buffer->dtype) {
    case nk_xla_f64_k: return nk_f64_k;
    case nk_xla_f32_k: return nk_f32_k;
    case nk_xla_f16_k: return nk_f16_k;
    case nk_xla_bf16_k: return nk_bf16_k;
    default: return nk_dtype_unknown_k;
    }
}

/* Element of an index array. */
static nk_i64_t nk_index_at_(nk_xla_buffer_t const *buffer, nk_size_t index) {
    if (buffer->dtype == nk_xla_s64_k) return ((nk_i64_t const *)buffer->data)[index];
    return ((nk_i32_t const *)buffer->data)[index];
}

static nk_size_t nk_elements_(nk_xla_buffer_t const *buffer) {
    nk_size_t count = 1;
    for (nk_i64_t axis = 0; axis != buffer->rank; ++axis) count *= (nk_size_t)buffer->dims[axis];
    return count;
}

/* Scratch that grows; what it held is lost then. */
typedef struct nk_memory_t {
    void *data;
    nk_size_t bytes;
} nk_memory_t;

static void *nk_reserve_(nk_memory_t *memory, nk_size_t bytes) {
    if (memory->bytes >= bytes && memory->data) return memory->data;
    free(memory->data);
    memory->data = malloc(bytes ? bytes : 1);
    memory->bytes = memory->data ? bytes : 0;
    return memory->data;
}

/* -------------------------------------------------------------------------------------------------------- one side */

/* Token sets as a call gets them. */
typedef struct nk_side_t {
    char const *name; /* for messages */
    nk_xla_layout_t layout;
    nk_u8_t const *tokens;        /* or the packed buffer */
    nk_xla_buffer_t const *valid; /* lengths, mask or spans */
    nk_size_t sets;
    nk_size_t longest; /* rows of a set of a padded layout */
    nk_size_t begin;   /* first set of a packed buffer */
    nk_size_t depth, token_bytes;
    nk_dtype_t dtype;
} nk_side_t;

/* First row of a set, and how many rows may hold its tokens. */
static nk_size_t nk_first_row_(nk_side_t const *side, nk_size_t set) {
    if (side->layout == nk_xla_layout_spans_k) return (nk_size_t)nk_index_at_(side->valid, 2 * set);
    return set * side->longest;
}

static nk_size_t nk_row_count_(nk_side_t const *side, nk_size_t set) {
    switch (side->layout) {
    case nk_xla_layout_lengths_k: return (nk_size_t)nk_index_at_(side->valid, set);
    case nk_xla_layout_spans_k:
        return (nk_size_t)(nk_index_at_(side->valid, 2 * set + 1) - nk_index_at_(side->valid, 2 * set));
    case nk_xla_layout_packed_k: {
        nk_u64_t const *const offsets = nk_packed_offsets(side->tokens) + side->begin + set;
        return offsets[1] - offsets[0];
    }
    default: return side->longest;
    }
}

/* Entries of a set's mask, or null where every row is a token. */
static nk_u8_t const *nk_mask_of_(nk_side_t const *side, nk_size_t set) {
    return side->layout == nk_xla_layout_mask_k ? (nk_u8_t const *)side->valid->data + set * side->longest : NULL;
}

static nk_size_t nk_token_count_(nk_side_t const *side, nk_size_t set) {
    nk_u8_t const *const mask = nk_mask_of_(side, set);
    nk_size_t const rows = nk_row_count_(side, set);
    nk_size_t count = 0;
    if (!mask) return rows;
    for (nk_size_t row = 0; row != rows; ++row) count += mask[row] != 0;
    return count;
}

/* Rows of a set's valid tokens, in order: where an index among them lies in the input. Returns their count. */
static nk_size_t nk_list_places_(nk_side_t const *side, nk_size_t set, nk_i32_t *places) {
    nk_u8_t const *const mask = nk_mask_of_(side, set);
    nk_size_t const rows = nk_row_count_(side, set);
    nk_size_t count = 0;
    for (nk_size_t row = 0; row != rows; ++row)
        if (!mask || mask[row]) places[count++] = (nk_i32_t)row;
    return count;
}

/* Takes one side's buffers off the arguments. */
static nk_xla_error_t *nk_read_side_(nk_xla_call_frame_t const *frame, char const *name, nk_i64_t layout,
                                     nk_i64_t begin, nk_size_t sets, nk_i64_t *next, nk_side_t *side) {
    nk_xla_buffer_t const *const tokens = frame->arguments.buffers[(*next)++];
    memset(side, 0, sizeof(*side));
    side->name = name;
    side->layout = (nk_xla_layout_t)layout;
    side->tokens = (nk_u8_t const *)tokens->data;
    side->sets = sets;
    side->begin = (nk_size_t)begin;
    if (layout == nk_xla_layout_packed_k) {
        nk_status_t status = nk_packed_check(side->tokens, nk_elements_(tokens));
        if (status == nk_success_k) status = nk_packed_check_offsets(side->tokens, side->begin, side->begin + sets);
        if (status != nk_success_k) return nk_fail_with_status_(frame, status);
        nk_packed_header_t const *const header = (nk_packed_header_t const *)side->tokens;
        side->dtype = (nk_dtype_t)header->dtype;
        side->depth = header->depth;
        side->token_bytes = side->depth * nk_dtype_bytes(side->dtype);
        return NULL;
    }
    side->dtype = nk_dtype_of_(tokens);
    side->depth = (nk_size_t)tokens->dims[tokens->rank - 1];
    side->token_bytes = side->depth * nk_dtype_bytes(side->dtype);
    side->longest = (nk_size_t)tokens->dims[tokens->rank - 2];
    if (layout == nk_xla_layout_full_k) return NULL;
    side->valid = frame->arguments.buffers[(*next)++];
    if (layout == nk_xla_layout_mask_k) return NULL;
    nk_i64_t const limit = (nk_i64_t)side->longest;
    for (nk_size_t set = 0; set != sets; ++set) {
        int const spans = layout == nk_xla_layout_spans_k;
        nk_i64_t const first = spans ? nk_index_at_(side->valid, 2 * set) : 0;
        nk_i64_t const last = nk_index_at_(side->valid, spans ? 2 * set + 1 : set);
        if (0 <= first && first <= last && last <= limit) continue;
        return spans ? nk_fail_(frame, nk_xla_invalid_argument_k,
                                "%s_offsets: from %lld to %lld at entry %llu, wanted 0 to %lld and non-decreasing",
                                name, (long long)first, (long long)last, (unsigned long long)set, (long long)limit)
                     : nk_fail_(frame, nk_xla_invalid_argument_k, "%s_lengths: %lld at entry %llu, wanted 0 to %lld",
                                name, (long long)last, (unsigned long long)set, (long long)limit);
    }
    return NULL;
}

/* ------------------------------------------------------------------------------------------------------- packing */

/* The public functions of one dtype. */
typedef struct nk_entry_t {
    nk_status_t (*size)(nk_size_t, nk_size_t, nk_size_t, nk_capability_t, nk_size_t *);
    nk_status_t (*pack)(nk_maxsim_pack_t const *, nk_capability_t, nk_stream_t);
    nk_status_t (*score)(nk_maxsim_corpus_t const *, nk_capability_t, nk_stream_t);
} nk_entry_t;

static nk_entry_t nk_entry_of_(nk_dtype_t dtype) {
#define NK_ENTRY_(dtype)                                                                                               \
    {                                                                                                                  \
        nk_maxsim_pack_corpus_size_##dtype##_best, nk_maxsim_pack_corpus_##dtype##_best,                               \
            nk_maxsim_corpus_##dtype##_best                                                                            \
    }
    static nk_entry_t const entries[] = {NK_ENTRY_(bf16), NK_ENTRY_(f16), NK_ENTRY_(f32)};
#undef NK_ENTRY_
    return entries[dtype == nk_bf16_k ? 0 : dtype == nk_f16_k ? 1 : 2];
}

/* Sets to pack: `sets`, or where that is null those from `first` on. */
typedef struct nk_choice_t {
    nk_i64_t const *sets;
    nk_size_t first, count;
} nk_choice_t;

static nk_size_t nk_chosen_(nk_choice_t const *choice, nk_size_t index) {
    return choice->sets ? (nk_size_t)choice->sets[index] : choice->first + index;
}

/* Where the tokens of the chosen sets lie: one run for each stretch of valid rows, joined where they touch. With null
 * arrays it only counts the runs. */
static nk_size_t nk_list_runs_(nk_side_t const *side, nk_choice_t const *choice, nk_u64_t *pointers, nk_u64_t *counts,
                               nk_u64_t *offsets) {
    nk_size_t runs = 0, total = 0, end_row = (nk_size_t)-1;
    for (nk_size_t index = 0; index != choice->count; ++index) {
        nk_size_t const set = nk_chosen_(choice, index), first = nk_first_row_(side, set);
        nk_size_t const rows = nk_row_count_(side, set);
        nk_u8_t const *const mask = nk_mask_of_(side, set);
        if (offsets) offsets[index] = total;
        for (nk_size_t row = 0, stop; row < rows; row = stop) {
            stop = row + 1;
            if (mask && !mask[row]) continue;
            while (stop != rows && (!mask || mask[stop])) stop = mask ? stop + 1 : rows;
            total += stop - row;
            if (first + row != end_row) {
                if (pointers) pointers[runs] = (nk_u64_t)(uintptr_t)(side->tokens + (first + row) * side->token_bytes);
                if (counts) counts[runs] = 0;
                ++runs;
            }
            if (counts) counts[runs - 1] += stop - row;
            end_row = first + stop;
        }
    }
    if (offsets) offsets[choice->count] = total;
    return runs;
}

/* The chosen sets as a collection of token runs, which lie in `lists`. */
static nk_status_t nk_list_sets_(nk_side_t const *side, nk_choice_t const *choice, nk_memory_t *lists,
                                 nk_maxsim_pack_t *collection) {
    nk_size_t const runs = nk_list_runs_(side, choice, NULL, NULL, NULL);
    nk_u64_t *const words = (nk_u64_t *)nk_reserve_(lists, (4 * runs + choice->count + 1) * sizeof(nk_u64_t));
    if (!words) return nk_bad_alloc_k;
    nk_u64_t *const pointers = words, *const counts = words + runs, *const offsets = words + 4 * runs;
    nk_i64_t *const row_strides = (nk_i64_t *)(words + 2 * runs), *const element_strides = row_strides + runs;
    nk_list_runs_(side, choice, pointers, counts, offsets);
    for (nk_size_t run = 0; run != runs; ++run) {
        row_strides[run] = (nk_i64_t)side->token_bytes;
        element_strides[run] = (nk_i64_t)nk_dtype_bytes(side->dtype);
    }
    nk_maxsim_pack_t const listed = {
        {runs, pointers, counts, row_strides, element_strides}, offsets, choice->count, side->depth, 0, NULL};
    *collection = listed;
    return nk_success_k;
}

static nk_status_t nk_pack_side_(nk_side_t const *side, nk_choice_t const *choice, nk_capability_t capabilities,
                                 nk_memory_t *lists, nk_memory_t *packed) {
    nk_entry_t const entry = nk_entry_of_(side->dtype);
    nk_maxsim_pack_t job;
    nk_size_t bytes;
    nk_status_t status = nk_list_sets_(side, choice, lists, &job);
    if (status == nk_success_k)
        status = entry.size(job.documents, job.offsets[job.documents], side->depth, capabilities, &bytes);
    if (status != nk_success_k) return status;
    job.packed = nk_reserve_(packed, bytes);
    return job.packed ? entry.pack(&job, capabilities, NULL) : nk_bad_alloc_k;
}

/* ------------------------------------------------------------------------------------------------------- the call */

/* Query sets [row_begin, row_end) against columns [column_begin, column_end) of the scores. With candidates either all
 * rows have the same ones (shared), or the unit has all columns. */
typedef struct nk_unit_of_call_t {
    nk_size_t row_begin, row_end, column_begin, column_end;
    int shared;
} nk_unit_of_call_t;

typedef struct nk_call_t {
    nk_side_t queries, documents;
    nk_xla_buffer_t const *candidates; /* or null */
    nk_size_t rows, columns, token_stride;
    nk_maxsim_corpus_t options; /* metric, mean, empty value */
    nk_capability_t capabilities;
    nk_i64_t outputs;
    nk_xla_buffer_t const *scores, *argmax, *token_scores, *bounds; /* the last three may be null */
    nk_maxsim_gradient_t const *gradient; /* of a backward pass: units are ranges of its rows */
    nk_nearest_t const *nearest;          /* of a search: units are ranges of the points */
    nk_unit_of_call_t *units;
    nk_size_t unit_count;
    nk_f64_t work;
} nk_call_t;

/* What a thread keeps from unit to unit. */
typedef struct nk_worker_t {
    nk_size_t row_begin, row_end; /* packed in `queries` */
    nk_maxsim_pack_t arrays;      /* documents as they came */
    nk_memory_t queries, lists, chosen, results, places;
} nk_worker_t;

static nk_i64_t nk_candidate_(nk_call_t const *call, nk_size_t row, nk_size_t column) {
    return call->candidates ? nk_index_at_(call->candidates, row * call->columns + column) : (nk_i64_t)column;
}

static nk_size_t nk_column_token_count_(nk_call_t const *call, nk_size_t row, nk_size_t column) {
    nk_i64_t const document = nk_candidate_(call, row, column);
    return document < 0 ? 0 : nk_token_count_(&call->documents, (nk_size_t)document);
}

/* Fill in the two sides of a unit's job; queries are packed. */
static nk_status_t nk_place_queries_(nk_call_t const *call, nk_unit_of_call_t const *unit, nk_worker_t *worker,
                                     nk_maxsim_corpus_t *job) {
    nk_size_t const rows = unit->row_end - unit->row_begin;
    job->query_begin = 0;
    if (call->queries.layout == nk_xla_layout_packed_k) {
        job->queries = call->queries.tokens;
        job->query_begin = call->queries.begin + unit->row_begin;
    } else if (worker->row_begin != unit->row_begin || worker->row_end != unit->row_end) {
        nk_choice_t const choice = {NULL, unit->row_begin, rows};
        nk_status_t const status =
            nk_pack_side_(&call->queries, &choice, call->capabilities, &worker->lists, &worker->queries);
        if (status != nk_success_k) return status;
        worker->row_begin = unit->row_begin;
        worker->row_end = unit->row_end;
    }
    if (call->queries.layout != nk_xla_layout_packed_k) job->queries = worker->queries.data;
    job->query_end = job->query_begin + rows;
    return nk_success_k;
}

static nk_status_t nk_place_documents_(nk_call_t const *call, nk_unit_of_call_t const *unit, nk_worker_t *worker,
                                       nk_maxsim_corpus_t *job) {
    nk_side_t const *const side = &call->documents;
    nk_size_t const columns = unit->column_end - unit->column_begin, rows = unit->row_end - unit->row_begin;
    int const packed = side->layout == nk_xla_layout_packed_k;
    job->documents = side->tokens;
    job->document_begin = side->begin + unit->column_begin;
    job->document_end = job->document_begin + columns;
    nk_choice_t choice = {NULL, unit->column_begin, columns};
    if (call->candidates) { /* [rows][columns] as the job takes them, then those to pack */
        nk_i64_t *const list = (nk_i64_t *)nk_reserve_(&worker->chosen, 2 * rows * columns * sizeof(nk_i64_t));
        nk_i64_t *const kept = list + rows * columns;
        nk_size_t count = 0;
        if (!list) return nk_bad_alloc_k;
        for (nk_size_t row = 0; row != rows; ++row)
            for (nk_size_t column = 0; column != columns; ++column) {
                nk_size_t const at = row * columns + column;
                nk_i64_t const document = nk_candidate_(call, unit->row_begin + row, unit->column_begin + column);
                list[at] = document < 0 ? -1 : document + (nk_i64_t)side->begin;
                if (packed || document < 0) continue;
                if (unit->shared && row) list[at] = list[column];
                if (unit->shared && row) continue;
                kept[count] = document;
                list[at] = (nk_i64_t)count++;
            }
        job->candidates = list;
        job->candidate_count = columns;
        choice.sets = kept;
        choice.count = count;
    }
    if (packed) return nk_success_k;
    nk_status_t const status = nk_list_sets_(side, &choice, &worker->lists, &worker->arrays);
    job->documents = NULL;
    job->arrays = &worker->arrays;
    job->document_begin = 0;
    job->document_end = choice.count;
    if (unit->shared && choice.count == columns) job->candidates = NULL; /* a range lets query sets share a chunk */
    return status;
}

static void nk_store_real_(nk_xla_buffer_t const *buffer, nk_size_t at, nk_f64_t value) {
    if (buffer->dtype == nk_xla_f64_k)
        ((nk_f64_t *)buffer->data)[at] = value;
    else
        ((nk_f32_t *)buffer->data)[at] = (nk_f32_t)value;
}

static nk_f64_t nk_load_real_(nk_dtype_t dtype, void const *values, nk_size_t at) {
    return dtype == nk_f32_k ? ((nk_f64_t const *)values)[at] : (nk_f64_t)((nk_f32_t const *)values)[at];
}

/* A bound as f32, rounded up, after the score itself was rounded to f32. */
static nk_f64_t nk_widen_bound_(nk_f64_t bound, nk_f64_t score, int rounded) {
    if (!rounded || bound == 0) return bound;
    return (bound + fabs(score) * 0x1p-24) * (1 + 0x1p-22) + 0x1p-149;
}

/* Rewrites one column's argmax from indices among valid tokens to rows of the input. */
static void nk_place_argmax_(nk_i32_t const *argmax, nk_i32_t const *query_places, nk_size_t count,
                             nk_i32_t const *document_places, nk_size_t stride, nk_i32_t *target) {
    for (nk_size_t row = 0; row != stride; ++row) target[row] = -1;
    for (nk_size_t token = 0; token != count; ++token)
        if (argmax[token] >= 0) target[query_places[token]] = document_places[argmax[token]];
}

/* Moves a unit's results to their places in the outputs. */
static nk_status_t nk_deliver_(nk_call_t const *call, nk_unit_of_call_t const *unit, nk_worker_t *worker,
                               nk_maxsim_corpus_t const *job) {
    nk_size_t const columns = unit->column_end - unit->column_begin, rows = unit->row_end - unit->row_begin;
    nk_size_t const stride = call->token_stride;
    nk_dtype_t const dtype = call->documents.dtype;
    int const places = (call->outputs & nk_xla_output_places_k) != 0;
    int const rounded = dtype == nk_f32_k && call->scores->dtype == nk_xla_f32_k;
    nk_i32_t *document_places = NULL, *query_places = NULL, *counts = NULL;
    if (places) {
        nk_size_t longest = call->documents.longest;
        for (nk_size_t column = 0; column != columns && call->documents.layout == nk_xla_layout_packed_k; ++column)
            for (nk_size_t row = 0; row != rows; ++row) {
                nk_size_t const tokens =
                    nk_column_token_count_(call, unit->row_begin + row, unit->column_begin + column);
                longest = tokens > longest ? tokens : longest;
            }
        counts = (nk_i32_t *)nk_reserve_(&worker->places, (rows * (stride + 1) + longest) * sizeof(nk_i32_t));
        if (!counts) return nk_bad_alloc_k;
        query_places = counts + rows;
        document_places = query_places + rows * stride;
        for (nk_size_t row = 0; row != rows; ++row)
            counts[row] = (nk_i32_t)nk_list_places_(&call->queries, unit->row_begin + row, query_places + row * stride);
    }
    for (nk_size_t column = 0; column != columns; ++column) {
        nk_i64_t listed = -1;
        for (nk_size_t row = 0; row != rows; ++row) {
            nk_size_t const from = row * columns + column;
            nk_size_t const to = (unit->row_begin + row) * call->columns + unit->column_begin + column;
            nk_f64_t const score = nk_load_real_(dtype, job->scores, from);
            nk_store_real_(call->scores, to, score);
            if (call->bounds) nk_store_real_(call->bounds, to, nk_widen_bound_(job->bounds[from], score, rounded));
            for (nk_size_t token = 0; call->token_scores && token != stride; ++token)
                nk_store_real_(call->token_scores, to * stride + token,
                               nk_load_real_(dtype, job->token_scores, from * stride + token));
            if (!call->argmax) continue;
            nk_i32_t *const target = (nk_i32_t *)call->argmax->data + to * stride;
            nk_i32_t const *const source = job->argmax + from * stride;
            if (!places) {
                memcpy(target, source, stride * sizeof(nk_i32_t));
                continue;
            }
            nk_i64_t const document = nk_candidate_(call, unit->row_begin + row, unit->column_begin + column);
            if (document >= 0 && document != listed)
                nk_list_places_(&call->documents, (nk_size_t)document, document_places);
            listed = document;
            nk_place_argmax_(source, query_places + row * stride, (nk_size_t)counts[row], document_places, stride,
                             target);
        }
    }
    return nk_success_k;
}

static nk_status_t nk_run_unit_of_call_(nk_call_t const *call, nk_unit_of_call_t const *unit, nk_worker_t *worker) {
    nk_maxsim_corpus_t job = call->options;
    nk_size_t const cells = (unit->row_end - unit->row_begin) * (unit->column_end - unit->column_begin);
    nk_status_t status = nk_place_queries_(call, unit, worker, &job);
    if (status == nk_success_k) status = nk_place_documents_(call, unit, worker, &job);
    if (status != nk_success_k) return status;

    nk_size_t const tokens = cells * call->token_stride;
    nk_size_t const bytes = cells * 16 + (call->argmax ? tokens * 4 : 0) + (call->token_scores ? tokens * 8 : 0);
    nk_u8_t *results = (nk_u8_t *)nk_reserve_(&worker->results, bytes);
    if (!results) return nk_bad_alloc_k;
    job.scores = results;
    job.bounds = call->bounds ? (nk_f64_t *)(results + cells * 8) : NULL;
    job.token_scores = call->token_scores ? results + cells * 16 : NULL;
    job.argmax = call->argmax ? (nk_i32_t *)(results + bytes - tokens * 4) : NULL;
    job.score_stride = unit->column_end - unit->column_begin;
    job.token_stride = call->token_stride;
    status = nk_entry_of_(call->documents.dtype).score(&job, call->capabilities, NULL);
    return status == nk_success_k ? nk_deliver_(call, unit, worker, &job) : status;
}

/* ---------------------------------------------------------------------------------------------------- the threads */

/* What the threads of a call share. Helpers may start after the call has returned: they find no unit left, and the last
 * one to leave frees it. */
typedef struct nk_crew_t {
    nk_call_t const *call;
    nk_status_t (*run)(nk_call_t const *call, nk_unit_of_call_t const *unit, nk_worker_t *worker);
    nk_size_t next, count;
    nk_status_t status;
    nk_size_t running, references;
#if NK_XLA_THREADS_
    pthread_mutex_t lock;
    pthread_cond_t idle;
#endif
} nk_crew_t;

#if NK_XLA_THREADS_
static void nk_lock_(nk_crew_t *crew) { pthread_mutex_lock(&crew->lock); }
static void nk_unlock_(nk_crew_t *crew) { pthread_mutex_unlock(&crew->lock); }
#else
static void nk_lock_(nk_crew_t *crew) { (void)crew; }
static void nk_unlock_(nk_crew_t *crew) { (void)crew; }
#endif

/* Next unit, or null when there is none left or one has failed. Called with the lock held. */
static nk_unit_of_call_t const *nk_next_unit_(nk_crew_t *crew) {
    return crew->status == nk_success_k && crew->next != crew->count ? &crew->call->units[crew->next++] : NULL;
}

/* Runs units until none is left. Called with the lock held, returns with it held. */
static void nk_run_units_(nk_crew_t *crew) {
    nk_worker_t worker;
    memset(&worker, 0, sizeof(worker));
    crew->running += 1;
    for (nk_unit_of_call_t const *unit; (unit = nk_next_unit_(crew));) {
        nk_unlock_(crew);
        nk_status_t const status = crew->run(crew->call, unit, &worker);
        nk_lock_(crew);
        if (status != nk_success_k) crew->status = status;
    }
    free(worker.queries.data);
    free(worker.lists.data);
    free(worker.chosen.data);
    free(worker.results.data);
    free(worker.places.data);
    crew->running -= 1;
}

#if NK_XLA_THREADS_
static void nk_leave_(nk_crew_t *crew) {
    nk_size_t const left = --crew->references;
    if (!crew->running) pthread_cond_signal(&crew->idle);
    nk_unlock_(crew);
    if (left) return;
    pthread_cond_destroy(&crew->idle);
    pthread_mutex_destroy(&crew->lock);
    free(crew);
}

static void nk_help_(void *data) {
    nk_crew_t *const crew = (nk_crew_t *)data;
    nk_lock_(crew);
    if (crew->next != crew->count) nk_run_units_(crew);
    nk_leave_(crew);
}

/* Threads of XLA's pool; 1 when it has none to offer. */
static nk_size_t nk_pool_threads_(nk_xla_call_frame_t const *frame) {
    nk_i64_t threads = 1;
    nk_xla_thread_count_t arguments = {sizeof(arguments), NULL, frame->context, &threads};
    nk_xla_error_t *const error = frame->api->thread_count(&arguments);
    if (!error) return threads > 1 ? (nk_size_t)threads : 1;
    nk_xla_error_destroy_t destroy = {sizeof(destroy), NULL, error};
    frame->api->error_destroy(&destroy);
    return 1;
}

static int nk_schedule_(nk_xla_call_frame_t const *frame, nk_crew_t *crew) {
    nk_xla_schedule_t arguments = {sizeof(arguments), NULL, frame->context, nk_help_, crew};
    nk_xla_error_t *const error = frame->api->schedule(&arguments);
    if (!error) return 1;
    nk_xla_error_destroy_t destroy = {sizeof(destroy), NULL, error};
    frame->api->error_destroy(&destroy);
    return 0;
}

static nk_status_t nk_run_call_(nk_xla_call_frame_t const *frame, nk_crew_t const *plan, nk_size_t threads) {
    nk_size_t const helpers = (threads < plan->count ? threads : plan->count) - 1;
    nk_crew_t *const crew = (nk_crew_t *)malloc(sizeof(nk_crew_t));
    if (!crew) return nk_bad_alloc_k;
    *crew = *plan;
    pthread_mutex_init(&crew->lock, NULL);
    pthread_cond_init(&crew->idle, NULL);
    crew->references = 1 + helpers;
    for (nk_size_t helper = 0; helper != helpers; ++helper) {
        if (nk_schedule_(frame, crew)) continue;
        nk_lock_(crew);
        crew->references -= 1;
        nk_unlock_(crew);
    }
    nk_lock_(crew);
    nk_run_units_(crew);
    while (crew->running) pthread_cond_wait(&crew->idle, &crew->lock);
    nk_status_t const status = crew->status;
    crew->next = crew->count; /* after an error: nobody may begin another unit */
    nk_leave_(crew);
    return status;
}
#else
static nk_size_t nk_pool_threads_(nk_xla_call_frame_t const *frame) {
    (void)frame;
    return 1;
}

static nk_status_t nk_run_call_(nk_xla_call_frame_t const *frame, nk_crew_t const *plan, nk_size_t threads) {
    nk_crew_t crew = *plan;
    (void)frame;
    (void)threads;
    nk_run_units_(&crew);
    return crew.status;
}
#endif

/* ------------------------------------------------------------------------------------------------------- the units */

static nk_status_t nk_add_unit_(nk_call_t *call, nk_size_t *room, nk_unit_of_call_t unit) {
    if (call->unit_count == *room) {
        *room = *room ? 2 * *room : 16;
        nk_unit_of_call_t *const grown = (nk_unit_of_call_t *)realloc(call->units, *room * sizeof(nk_unit_of_call_t));
        if (!grown) return nk_bad_alloc_k;
        call->units = grown;
    }
    call->units[call->unit_count++] = unit;
    return nk_success_k;
}

/* Rows from `row` on that have the same candidates as it. */
static nk_size_t nk_bundle_end_(nk_call_t const *call, nk_size_t row) {
    if (!call->candidates) return call->rows;
    nk_size_t const bytes = call->columns * (call->candidates->dtype == nk_xla_s64_k ? 8 : 4);
    char const *const lists = (char const *)call->candidates->data;
    nk_size_t end = row + 1;
    while (end != call->rows && !memcmp(lists + end * bytes, lists + row * bytes, bytes)) ++end;
    return end;
}

/* Cuts rows with the same columns into units of at most `limit` document tokens, or of one document. */
static nk_status_t nk_cut_bundle_(nk_call_t *call, nk_size_t *room, nk_size_t row_begin, nk_size_t row_end,
                                  nk_size_t limit, nk_size_t threads) {
    nk_size_t const first = call->unit_count, rows = row_end - row_begin;
    nk_size_t tokens = 0, total = 0, query_tokens = 0, begin = 0;
    nk_status_t status = nk_success_k;
    for (nk_size_t column = 0; column != call->columns && status == nk_success_k; ++column) {
        nk_size_t const count = nk_column_token_count_(call, row_begin, column);
        if (column != begin && tokens + count > limit) {
            status = nk_add_unit_(call, room, (nk_unit_of_call_t){row_begin, row_end, begin, column, 1});
            tokens = 0;
            begin = column;
        }
        tokens += count;
        total += count;
    }
    if (status == nk_success_k)
        status = nk_add_unit_(call, room, (nk_unit_of_call_t){row_begin, row_end, begin, call->columns, 1});
    for (nk_size_t row = row_begin; row != row_end; ++row) query_tokens += nk_token_count_(&call->queries, row);
    nk_f64_t const work = (nk_f64_t)total * (nk_f64_t)query_tokens * (nk_f64_t)call->documents.depth;
    call->work += work;

    /* Fewer units than threads: split the query sets too, all columns of a range of sets after one another. */
    nk_size_t const blocks = call->unit_count - first;
    nk_size_t parts = (threads + blocks - 1) / blocks;
    if (parts > rows) parts = rows;
    if (call->candidates || parts < 2 || work < 2.0 * nk_xla_piece_work_k) return status;
    for (nk_size_t part = 1; part != parts && status == nk_success_k; ++part)
        for (nk_size_t block = 0; block != blocks && status == nk_success_k; ++block) {
            nk_unit_of_call_t unit = call->units[first + block];
            unit.row_begin = row_begin + rows * part / parts;
            unit.row_end = row_begin + rows * (part + 1) / parts;
            status = nk_add_unit_(call, room, unit);
        }
    for (nk_size_t block = 0; block != blocks; ++block) call->units[first + block].row_end = row_begin + rows / parts;
    return status;
}

/* Single rows with few candidates follow one another in a unit while they stay below the limit. */
static int nk_join_last_unit_(nk_call_t *call, nk_size_t row, nk_size_t *last_tokens, nk_size_t limit) {
    nk_size_t tokens = 0, query_tokens = nk_token_count_(&call->queries, row);
    for (nk_size_t column = 0; column != call->columns; ++column) tokens += nk_column_token_count_(call, row, column);
    if (tokens > limit || !call->unit_count || *last_tokens + tokens > limit) return 0;
    nk_unit_of_call_t *const last = &call->units[call->unit_count - 1];
    if (last->row_end != row || last->column_begin || last->column_end != call->columns) return 0;
    last->row_end = row + 1;
    last->shared = 0;
    *last_tokens += tokens;
    call->work += (nk_f64_t)tokens * (nk_f64_t)query_tokens * (nk_f64_t)call->documents.depth;
    return 1;
}

static nk_status_t nk_cut_call_(nk_call_t *call, nk_size_t threads) {
    int const packed = call->documents.layout == nk_xla_layout_packed_k;
    nk_size_t const limit = nk_xla_unit_tokens_k, token_bytes = call->documents.token_bytes;
    nk_size_t const joined = packed || !token_bytes ? limit : nk_xla_joined_bytes_k / token_bytes + 1;
    nk_size_t room = 0, last_tokens = limit;
    nk_status_t status = nk_success_k;
    for (nk_size_t row = 0, end; row != call->rows && status == nk_success_k; row = end) {
        end = nk_bundle_end_(call, row);
        if (call->candidates && end == row + 1 && nk_join_last_unit_(call, row, &last_tokens, joined)) continue;
        nk_size_t const units = call->unit_count;
        status = nk_cut_bundle_(call, &room, row, end, limit, threads);
        last_tokens = limit; /* a bundle of several rows, or one that was cut, is not joined */
        if (end != row + 1 || call->unit_count != units + 1) continue;
        last_tokens = 0;
        for (nk_size_t column = 0; column != call->columns; ++column)
            last_tokens += nk_column_token_count_(call, row, column);
    }
    return status;
}

/* ------------------------------------------------------------------------------------------------------ the handler */

#if NK_XLA_THREADS_
static pthread_mutex_t nk_seen_lock_ = PTHREAD_MUTEX_INITIALIZER;
#endif
static nk_u64_t nk_seen_calls_, nk_seen_address_;

static void nk_see_(void const *address) {
#if NK_XLA_THREADS_
    pthread_mutex_lock(&nk_seen_lock_);
#endif
    nk_seen_calls_ += 1;
    nk_seen_address_ = (nk_u64_t)(uintptr_t)address;
#if NK_XLA_THREADS_
    pthread_mutex_unlock(&nk_seen_lock_);
#endif
}

nk_u64_t nk_xla_calls(void) { return nk_seen_calls_; }
nk_u64_t nk_xla_last_address(void) { return nk_seen_address_; }

/* Row for tokens that are not packed yet: that of the side which is, else the best one. */
static nk_capability_t nk_capabilities_of_(nk_call_t const *call) {
    nk_side_t const *const packed = call->documents.layout == nk_xla_layout_packed_k ? &call->documents
                                    : call->queries.layout == nk_xla_layout_packed_k ? &call->queries
                                                                                     : NULL;
    if (!packed) return nk_cpu_capabilities_enabled();
    nk_packed_header_t const *const header = (nk_packed_header_t const *)packed->tokens;
    return nk_backend_by_layout(header->layout)->required;
}

static nk_xla_error_t *nk_check_candidates_of_call_(nk_xla_call_frame_t const *frame, nk_call_t const *call) {
    nk_i64_t const limit = (nk_i64_t)call->documents.sets;
    for (nk_size_t index = 0; call->candidates && index != call->rows * call->columns; ++index) {
        nk_i64_t const document = nk_index_at_(call->candidates, index);
        if (document < -1 || document >= limit)
            return nk_fail_(frame, nk_xla_invalid_argument_k,
                            "candidates[%llu, %llu]: %lld, wanted 0 to %lld, or -1 for none",
                            (unsigned long long)(index / call->columns), (unsigned long long)(index % call->columns),
                            (long long)document, (long long)(limit - 1));
    }
    return NULL;
}

/* Both sides and the candidates, from argument `next` on; rows and columns are those of the scores. */
static nk_xla_error_t *nk_read_call_(nk_xla_call_frame_t const *frame, nk_i64_t next, nk_call_t *call) {
    nk_xla_error_t *error = nk_read_side_(frame, "q", nk_attribute_i64_(frame, "q_layout"),
                                          nk_attribute_i64_(frame, "q_begin"), call->rows, &next, &call->queries);
    if (error) return error;
    error =
        nk_read_side_(frame, "docs", nk_attribute_i64_(frame, "docs_layout"), nk_attribute_i64_(frame, "docs_begin"),
                      (nk_size_t)nk_attribute_i64_(frame, "documents"), &next, &call->documents);
    if (error) return error;
    if (nk_attribute_i64_(frame, "has_candidates")) call->candidates = frame->arguments.buffers[next++];
    if (call->queries.dtype != call->documents.dtype || call->queries.depth != call->documents.depth)
        return nk_fail_with_status_(frame, nk_pack_mismatch_k);
    call->capabilities = nk_capabilities_of_(call);
    call->options.metric = (nk_u32_t)nk_attribute_i64_(frame, "metric");
    call->options.mean = (nk_u32_t)nk_attribute_i64_(frame, "mean");
    call->options.empty_given = nk_attribute_(frame, "empty") != NULL;
    call->options.empty_value = nk_attribute_f64_(frame, "empty");
    return nk_check_candidates_of_call_(frame, call);
}

nk_xla_error_t *nk_xla_maxsim(nk_xla_call_frame_t *frame) {
    if (nk_not_executing_(frame, 0)) return NULL;
    nk_call_t call;
    memset(&call, 0, sizeof(call));
    nk_i64_t result = 0;
    call.scores = frame->results.buffers[result++];
    call.rows = (nk_size_t)call.scores->dims[0];
    call.columns = (nk_size_t)call.scores->dims[1];
    call.outputs = nk_attribute_i64_(frame, "outputs");
    if (call.outputs & nk_xla_output_argmax_k) call.argmax = frame->results.buffers[result++];
    if (call.outputs & nk_xla_output_token_scores_k) call.token_scores = frame->results.buffers[result++];
    if (call.outputs & nk_xla_output_bounds_k) call.bounds = frame->results.buffers[result++];
    nk_xla_buffer_t const *const by_token = call.argmax ? call.argmax : call.token_scores;
    if (by_token) call.token_stride = (nk_size_t)by_token->dims[2];
    nk_see_(frame->arguments.buffers[0]->data);
    nk_xla_error_t *const error = nk_read_call_(frame, 0, &call);
    if (error || !call.rows || !call.columns) return error;

    nk_size_t threads = nk_pool_threads_(frame);
    nk_status_t status = nk_cut_call_(&call, threads);
    if (call.work < 2.0 * nk_xla_piece_work_k) threads = 1;
    nk_crew_t const plan = {.call = &call, .run = nk_run_unit_of_call_, .count = call.unit_count};
    if (status == nk_success_k) status = nk_run_call_(frame, &plan, threads);
    free(call.units);
    return status == nk_success_k ? NULL : nk_fail_with_status_(frame, status);
}

/* ----------------------------------------------------------------------------------------------------- the gradient */

/* A side as the backward pass takes it. Padded rows are tokens that never win, so a padded layout is used where it
 * lies; only sets with rows between them that belong to nobody are copied together. */
typedef struct nk_sets_of_side_t {
    nk_token_sets_t sets;
    nk_u64_t *places; /* rows of the tokens in the gradient, or null: as they are */
    void *owned[4];
} nk_sets_of_side_t;

static void nk_free_sets_(nk_sets_of_side_t *sets) {
    for (int index = 0; index != 4; ++index) free(sets->owned[index]);
}

static void *nk_own_(nk_sets_of_side_t *sets, int slot, nk_size_t bytes) {
    return sets->owned[slot] = malloc(bytes ? bytes : 1);
}

/* Copies valid tokens together, and says where they came from. */
static nk_status_t nk_compact_(nk_side_t const *side, nk_u64_t const *offsets, nk_sets_of_side_t *sets) {
    nk_size_t const total = offsets[side->sets];
    nk_u8_t *const tokens = (nk_u8_t *)nk_own_(sets, 1, total * side->token_bytes);
    nk_u64_t *const places = (nk_u64_t *)nk_own_(sets, 2, total * sizeof(nk_u64_t));
    if (!tokens || !places) return nk_bad_alloc_k;
    for (nk_size_t set = 0, to = 0; set != side->sets; ++set) {
        nk_size_t const first = nk_first_row_(side, set), rows = nk_row_count_(side, set);
        nk_u8_t const *const mask = nk_mask_of_(side, set);
        for (nk_size_t row = 0; row != rows; ++row) {
            if (mask && !mask[row]) continue;
            memcpy(tokens + to * side->token_bytes, side->tokens + (first + row) * side->token_bytes,
                   side->token_bytes);
            places[to++] = first + row;
        }
    }
    sets->sets.tokens = tokens;
    sets->places = places;
    return nk_success_k;
}

static nk_status_t nk_lay_out_sets_(nk_side_t const *side, nk_sets_of_side_t *sets) {
    nk_u64_t *const offsets = (nk_u64_t *)nk_own_(sets, 0, (side->sets + 1) * sizeof(nk_u64_t));
    int const padded = side->layout != nk_xla_layout_packed_k && side->layout != nk_xla_layout_spans_k;
    int together = 1;
    if (!offsets) return nk_bad_alloc_k;
    offsets[0] = 0;
    for (nk_size_t set = 0; set != side->sets; ++set) {
        offsets[set + 1] = offsets[set] + (padded ? side->longest : nk_row_count_(side, set));
        together &= side->layout != nk_xla_layout_spans_k || nk_first_row_(side, set) == offsets[set];
    }
    sets->sets.tokens = side->tokens;
    sets->sets.offsets = offsets;
    sets->sets.sets = side->sets;
    if (side->layout == nk_xla_layout_packed_k)
        sets->sets.tokens =
            nk_packed_originals(side->tokens) + nk_packed_offsets(side->tokens)[side->begin] * side->token_bytes;
    return together ? nk_success_k : nk_compact_(side, offsets, sets);
}

static nk_status_t nk_square_sets_(nk_call_t const *call, nk_side_t const *side, nk_sets_of_side_t *sets) {
    nk_size_t const total = sets->sets.offsets[side->sets];
    nk_f64_t *const squares = (nk_f64_t *)nk_own_(sets, 3, total * sizeof(nk_f64_t));
    if (!squares) return nk_bad_alloc_k;
    sets->sets.squares = squares;
    return nk_token_squares(side->dtype, sets->sets.tokens, total, side->depth, squares, call->capabilities);
}

/* The upstream gradient in f64, the mean's division done: padded rows are none of the query's tokens. */
static void nk_read_upstream_(nk_call_t const *call, nk_xla_buffer_t const *upstream, nk_f64_t *values) {
    int const wide = upstream->dtype == nk_xla_f64_k;
    for (nk_size_t row = 0; row != call->rows; ++row) {
        nk_size_t const count = call->options.mean ? nk_token_count_(&call->queries, row) : 1;
        for (nk_size_t at = row * call->columns; at != (row + 1) * call->columns; ++at) {
            nk_f64_t const value =
                wide ? ((nk_f64_t const *)upstream->data)[at] : (nk_f64_t)((nk_f32_t const *)upstream->data)[at];
            values[at] = count > 1 ? value / (nk_f64_t)count : value;
        }
    }
}

/* Candidates in 64 bits, and turned round: the scores of every document in ascending order, by counting. */
static nk_status_t nk_turn_round_(nk_call_t const *call, nk_maxsim_gradient_t *job, void **owned) {
    nk_size_t const cells = call->rows * call->columns, documents = call->documents.sets;
    nk_u64_t *const words = (nk_u64_t *)malloc((2 * cells + documents + 2) * sizeof(nk_u64_t));
    *owned = words;
    if (!words) return nk_bad_alloc_k;
    nk_i64_t *const candidates = (nk_i64_t *)words;
    nk_u64_t *const listing = words + cells, *const offsets = words + 2 * cells;
    memset(offsets, 0, (documents + 2) * sizeof(nk_u64_t));
    for (nk_size_t at = 0; at != cells; ++at) {
        candidates[at] = nk_index_at_(call->candidates, at);
        if (candidates[at] >= 0) offsets[candidates[at] + 2] += 1;
    }
    for (nk_size_t document = 0; document != documents; ++document) offsets[document + 2] += offsets[document + 1];
    for (nk_size_t at = 0; at != cells; ++at)
        if (candidates[at] >= 0) listing[offsets[candidates[at] + 1]++] = at;
    job->candidates = candidates;
    job->listing = listing;
    job->listing_offsets = offsets;
    return nk_success_k;
}

static nk_status_t nk_run_gradient_(nk_call_t const *call, nk_unit_of_call_t const *unit, nk_worker_t *worker) {
    nk_maxsim_gradient_t job = *call->gradient;
    (void)worker;
    job.begin = unit->row_begin;
    job.end = unit->row_end;
    return nk_maxsim_gradient(&job, call->capabilities);
}

/* Rows of the gradient for everyone: equal shares of the query tokens, or of the documents. */
static nk_status_t nk_cut_gradient_(nk_call_t *call, nk_size_t threads) {
    nk_maxsim_gradient_t const *const job = call->gradient;
    nk_size_t const query_tokens = job->queries.offsets[job->queries.sets];
    nk_size_t const count = job->of_documents ? job->documents.sets : query_tokens;
    nk_size_t room = 0, parts = threads * nk_xla_units_per_thread_k;
    nk_status_t status = nk_success_k;
    call->work = nk_xla_gradient_work_k * (nk_f64_t)query_tokens * (nk_f64_t)call->columns * (nk_f64_t)job->depth;
    if (call->work < 2.0 * nk_xla_piece_work_k || parts < 1) parts = 1;
    if (parts > count) parts = count;
    for (nk_size_t part = 0; part != parts && status == nk_success_k; ++part)
        status =
            nk_add_unit_(call, &room, (nk_unit_of_call_t){count * part / parts, count * (part + 1) / parts, 0, 0, 0});
    return status;
}

static nk_status_t nk_run_gradient_call_(nk_xla_call_frame_t const *frame, nk_call_t *call, nk_maxsim_gradient_t *job,
                                         nk_xla_buffer_t const *upstream, nk_sets_of_side_t *queries,
                                         nk_sets_of_side_t *documents) {
    nk_side_t const *const own = job->of_documents ? &call->documents : &call->queries;
    nk_status_t status = nk_lay_out_sets_(&call->queries, queries);
    if (status == nk_success_k) status = nk_lay_out_sets_(&call->documents, documents);
    if (status == nk_success_k && call->options.metric != nk_metric_dot_k) {
        status = nk_square_sets_(call, &call->queries, queries);
        if (status == nk_success_k) status = nk_square_sets_(call, &call->documents, documents);
    }
    if (status != nk_success_k) return status;
    job->queries = queries->sets;
    job->documents = documents->sets;
    job->places = job->of_documents ? documents->places : queries->places;
    if (own->layout == nk_xla_layout_spans_k) memset(job->gradient, 0, own->longest * own->token_bytes);

    void *turned = NULL;
    nk_f64_t *const values = (nk_f64_t *)malloc(call->rows * call->columns * sizeof(nk_f64_t) + 1);
    if (!values) return nk_bad_alloc_k;
    nk_read_upstream_(call, upstream, values);
    job->upstream = values;
    job->upstream_strides[0] = (nk_i64_t)call->columns;
    job->upstream_strides[1] = 1;
    if (call->candidates) status = nk_turn_round_(call, job, &turned);
    call->gradient = job;
    nk_size_t threads = nk_pool_threads_(frame);
    if (status == nk_success_k) status = nk_cut_gradient_(call, threads);
    nk_crew_t const plan = {.call = call, .run = nk_run_gradient_, .count = call->unit_count};
    if (status == nk_success_k && plan.count) status = nk_run_call_(frame, &plan, threads);
    free(call->units);
    free(turned);
    free(values);
    return status;
}

nk_xla_error_t *nk_xla_maxsim_gradient(nk_xla_call_frame_t *frame) {
    if (nk_not_executing_(frame, 0)) return NULL;
    nk_xla_buffer_t const *const upstream = frame->arguments.buffers[0], *const places = frame->arguments.buffers[1];
    nk_call_t call;
    nk_maxsim_gradient_t job;
    nk_sets_of_side_t queries, documents;
    memset(&call, 0, sizeof(call));
    memset(&job, 0, sizeof(job));
    memset(&queries, 0, sizeof(queries));
    memset(&documents, 0, sizeof(documents));
    call.rows = (nk_size_t)upstream->dims[0];
    call.columns = (nk_size_t)upstream->dims[1];
    nk_see_(places->data);
    nk_xla_error_t *const error = nk_read_call_(frame, 2, &call);
    if (error) return error;

    nk_dtype_t const dtype = call.queries.dtype;
    job.dtype = job.gradient_dtype = (nk_u32_t)dtype;
    job.metric = call.options.metric;
    job.of_documents = (nk_u32_t)nk_attribute_i64_(frame, "of_documents");
    job.depth = call.queries.depth;
    job.columns = call.columns;
    job.argmax = (nk_i32_t const *)places->data;
    job.token_stride = (nk_size_t)places->dims[2];
    job.gradient = frame->results.buffers[0]->data;
    nk_status_t const status = nk_run_gradient_call_(frame, &call, &job, upstream, &queries, &documents);
    nk_free_sets_(&queries);
    nk_free_sets_(&documents);
    return status == nk_success_k ? NULL : nk_fail_with_status_(frame, status);
}

/* ------------------------------------------------------------------------------------------------ nearest neighbours
 */

/* A range of the points, counted in their sets' order. */
static nk_status_t nk_run_nearest_(nk_call_t const *call, nk_unit_of_call_t const *unit, nk_worker_t *worker) {
    nk_nearest_t job = *call->nearest;
    (void)worker;
    job.begin = unit->row_begin;
    job.end = unit->row_end;
    return nk_nearest(&job, call->capabilities);
}

/* Valid tokens of a side side by side, with their places. */
static nk_status_t nk_gather_sets_(nk_side_t const *side, nk_sets_of_side_t *sets) {
    nk_u64_t *const offsets = (nk_u64_t *)nk_own_(sets, 0, (side->sets + 1) * sizeof(nk_u64_t));
    if (!offsets) return nk_bad_alloc_k;
    offsets[0] = 0;
    for (nk_size_t set = 0; set != side->sets; ++set) offsets[set + 1] = offsets[set] + nk_token_count_(side, set);
    sets->sets.offsets = offsets;
    sets->sets.sets = side->sets;
    sets->sets.tokens = side->tokens;
    return side->layout == nk_xla_layout_full_k ? nk_success_k : nk_compact_(side, offsets, sets);
}

static nk_status_t nk_run_nearest_call_(nk_xla_call_frame_t const *frame, nk_call_t *call, nk_nearest_t *job,
                                        nk_sets_of_side_t *points, nk_sets_of_side_t *others, nk_i32_t *result) {
    nk_size_t const rows = call->queries.sets * call->queries.longest;
    nk_status_t status = nk_gather_sets_(&call->queries, points);
    if (status == nk_success_k) status = nk_gather_sets_(&call->documents, others);
    if (status != nk_success_k) return status;
    job->points = points->sets;
    job->others = others->sets;
    nk_size_t const count = job->points.offsets[call->queries.sets];
    job->nearest = (nk_i32_t *)nk_own_(points, 3, count * sizeof(nk_i32_t));
    job->squares = (nk_f64_t *)nk_own_(others, 3, count * sizeof(nk_f64_t));
    if (!job->nearest || !job->squares) return nk_bad_alloc_k;

    call->nearest = job;
    for (nk_size_t set = 0; set != call->queries.sets; ++set) {
        nk_f64_t const own = (nk_f64_t)(job->points.offsets[set + 1] - job->points.offsets[set]);
        call->work += own * (nk_f64_t)(job->others.offsets[set + 1] - job->others.offsets[set]) * (nk_f64_t)job->depth;
    }
    nk_size_t const threads = nk_pool_threads_(frame);
    nk_size_t room = 0, parts = call->work < 2.0 * nk_xla_piece_work_k ? 1 : threads * nk_xla_units_per_thread_k;
    if (parts > count) parts = count;
    for (nk_size_t part = 0; part != parts && status == nk_success_k; ++part)
        status =
            nk_add_unit_(call, &room, (nk_unit_of_call_t){count * part / parts, count * (part + 1) / parts, 0, 0, 0});
    nk_crew_t const plan = {.call = call, .run = nk_run_nearest_, .count = call->unit_count};
    if (status == nk_success_k && plan.count) status = nk_run_call_(frame, &plan, threads);
    free(call->units);
    if (status != nk_success_k) return status;

    nk_memory_t places = {NULL, 0};
    nk_i32_t *const list = (nk_i32_t *)nk_reserve_(&places, call->documents.longest * sizeof(nk_i32_t));
    for (nk_size_t row = 0; list && row != rows; ++row) result[row] = -1;
    for (nk_size_t set = 0; list && set != call->queries.sets; ++set) {
        nk_list_places_(&call->documents, set, list);
        for (nk_u64_t point = job->points.offsets[set]; point != job->points.offsets[set + 1]; ++point) {
            nk_u64_t const row = points->places ? points->places[point] : point;
            if (job->nearest[point] >= 0) result[row] = list[job->nearest[point]];
        }
    }
    free(places.data);
    return list ? nk_success_k : nk_bad_alloc_k;
}

nk_xla_error_t *nk_xla_nearest(nk_xla_call_frame_t *frame) {
    if (nk_not_executing_(frame, 0)) return NULL;
    nk_call_t call;
    nk_nearest_t job;
    nk_sets_of_side_t points, others;
    memset(&call, 0, sizeof(call));
    memset(&job, 0, sizeof(job));
    memset(&points, 0, sizeof(points));
    memset(&others, 0, sizeof(others));
    nk_xla_buffer_t const *const result = frame->results.buffers[0];
    call.rows = (nk_size_t)result->dims[0];
    nk_see_(frame->arguments.buffers[0]->data);
    nk_xla_error_t *const error = nk_read_call_(frame, 0, &call);
    if (error) return error;
    job.dtype = (nk_u32_t)call.queries.dtype;
    job.depth = call.queries.depth;
    nk_status_t const status = nk_run_nearest_call_(frame, &call, &job, &points, &others, (nk_i32_t *)result->data);
    nk_free_sets_(&points);
    nk_free_sets_(&others);
    return status == nk_success_k ? NULL : nk_fail_with_status_(frame, status);
}
