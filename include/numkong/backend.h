/* numkong/backend.h: the row. A backend is one file in c/backends/ and one line in backends.inc; selection happens
 * once, at pack time, and scoring asks the packed buffer which row it belongs to. */
#ifndef NUMKONG_BACKEND_H
#define NUMKONG_BACKEND_H

#include "capabilities.h"
#include "maxsim.h"
#include "packed.h"
#include "types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Which rows this compiler can build. */
#define NK_BUILD_ANY 1
#if (defined(__x86_64__) || defined(_M_X64)) && !defined(NK_ONLY_SERIAL)
#define NK_BUILD_X86 1
#else
#define NK_BUILD_X86 0
#endif

/* What a row's file defines. The kernels take validated arguments. */
typedef struct nk_backend_kernels_t {
    nk_u32_t tile_tokens; /* tokens in a tile of the screening plane; 0: no screening plane */
    nk_status_t (*pack)(nk_maxsim_pack_t const *job, nk_packed_header_t const *header);
    nk_status_t (*corpus)(nk_maxsim_corpus_t const *job);
} nk_backend_kernels_t;

typedef struct nk_backend_t {
    char const *name;
    nk_capability_t required;            /* every bit must be present */
    nk_u32_t layout;                     /* stamped into every buffer that it packs */
    nk_u32_t dtypes;                     /* bit 1 << nk_dtype_t for each type that it has */
    nk_backend_kernels_t const *kernels; /* null: not built for this architecture */
} nk_backend_t;

NK_PUBLIC nk_size_t nk_backend_count(void);
NK_PUBLIC nk_backend_t const *nk_backend_at(nk_size_t index);        /* in order of preference; null past the end */
NK_PUBLIC nk_backend_t const *nk_backend_by_layout(nk_u32_t layout); /* null when no row has it */
/* The first built row that needs no more than these capabilities and has the dtype; null when there is none. */
NK_PUBLIC nk_backend_t const *nk_backend_best(nk_dtype_t dtype, nk_capability_t capabilities);

/* The one function behind size, pack, score and unpack: fills a header for these counts, checksum included. */
nk_status_t nk_packed_describe(nk_backend_t const *backend, nk_dtype_t dtype, nk_size_t documents, nk_size_t tokens,
                               nk_size_t depth, nk_packed_header_t *header);
/* nk_success_k when the buffer starts with an intact header of a row in the table, with at most `bytes` bytes behind it
 * (pass UINT64_MAX where the length is unknown). Python's view of any packed bytes. */
NK_PUBLIC nk_status_t nk_packed_check(void const *packed, nk_size_t bytes);
/* The same, and offsets of documents [begin, end) in order and in range. */
NK_PUBLIC nk_status_t nk_packed_check_offsets(void const *packed, nk_size_t begin, nk_size_t end);

/* First step of packing: header (its magic still zero, so that a buffer whose packing was interrupted is refused),
 * offsets, and the gaps between regions. The last step is nk_packed_seal. */
void nk_packed_begin(nk_maxsim_pack_t const *job, nk_packed_header_t const *header);
void nk_packed_seal(nk_maxsim_pack_t const *job, nk_packed_header_t const *header);

/* What a register tile multiplies: 32-bit words of four int8 codes, of one f32, or of two bf16. */
typedef enum nk_operation_t { nk_multiply_codes_k, nk_multiply_f32_k, nk_multiply_bf16_k } nk_operation_t;

/* Bytes per element; 0 for an unknown dtype. */
nk_size_t nk_dtype_bytes(nk_dtype_t dtype);

/* Regions of a checked buffer. */
#define NK_REGION_(type, name)                                                                                         \
    static inline type *nk_packed_##name(void const *packed) {                                                         \
        return (type *)((nk_u8_t *)(uintptr_t)packed + ((nk_packed_header_t const *)packed)->name##_at);               \
    }
NK_REGION_(nk_u64_t, offsets)
NK_REGION_(nk_packed_document_t, documents)
NK_REGION_(nk_f64_t, square)
NK_REGION_(nk_f32_t, scale)
NK_REGION_(nk_f32_t, residual)
NK_REGION_(nk_f32_t, reach)
NK_REGION_(nk_u8_t, screen)
NK_REGION_(nk_u8_t, originals)
#undef NK_REGION_

/* Instruction sets live in regions of a file, so that the build's flags stay at the ABI's floor. */
#define NK_PRAGMA_(text) _Pragma(#text)
#if defined(__clang__)
#define NK_TARGET_BEGIN(features)                                                                                      \
    NK_PRAGMA_(clang attribute push(__attribute__((target(features))), apply_to = function))
#define NK_TARGET_END NK_PRAGMA_(clang attribute pop)
#elif defined(__GNUC__)
#define NK_TARGET_BEGIN(features) NK_PRAGMA_(GCC push_options) NK_PRAGMA_(GCC target(features))
#define NK_TARGET_END NK_PRAGMA_(GCC pop_options)
#else
#define NK_TARGET_BEGIN(features)
#define NK_TARGET_END
#endif

#if defined(__GNUC__)
#define NK_INLINE static inline __attribute__((always_inline))
#define NK_NOINLINE static __attribute__((noinline)) /* kernels: registers of their own */
#define NK_PREFETCH(address) __builtin_prefetch(address)
#define NK_PREFETCH_WRITE(address) __builtin_prefetch(address, 1)
#else
#define NK_INLINE static inline
#define NK_NOINLINE static
#define NK_PREFETCH(address) ((void)(address))
#define NK_PREFETCH_WRITE(address) ((void)(address))
#endif

/* Lines of memory that will be needed, fetched one by one while something else is computed. */
typedef struct nk_ahead_t {
    nk_u8_t const **lines;
    nk_size_t next, count;
} nk_ahead_t;
enum { nk_ahead_lines_k = 4096 };

NK_INLINE void nk_fetch_lines_(nk_ahead_t *ahead, nk_size_t lines) {
    for (; lines && ahead->next != ahead->count; --lines) NK_PREFETCH(ahead->lines[ahead->next++]);
}

/* Lines to fetch in each of `steps` steps, so that they are spread evenly: a burst would hold up the kernel's own
 * loads. */
NK_INLINE nk_size_t nk_fetch_share_(nk_ahead_t const *ahead, nk_size_t steps) {
    return (ahead->count - ahead->next + steps - 1) / steps;
}

#ifdef __cplusplus
}
#endif
#endif
