/* numkong/backend.h: the row. A backend is one file in c/backends/ and one line in backends.inc; selection happens
 * once, at pack time, and scoring asks the packed buffer which row it belongs to. */
#ifndef NUMKONG_BACKEND_H
#define NUMKONG_BACKEND_H

#include "capabilities.h"
#include "gradient.h"
#include "maxsim.h"
#include "packed.h"
#include "types.h"

#include <stdlib.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Which architecture this compiler builds for. NK_ONLY_SERIAL makes a build of nothing but portable C. */
#define NK_BUILD_ANY 1
#if (defined(__x86_64__) || defined(_M_X64)) && !defined(NK_ONLY_SERIAL)
#define NK_BUILD_X86 1
#else
#define NK_BUILD_X86 0
#endif
#if (defined(__aarch64__) || defined(_M_ARM64)) && !defined(NK_ONLY_SERIAL)
#define NK_BUILD_ARM64 1
#else
#define NK_BUILD_ARM64 0
#endif
#if defined(__wasm__) && !defined(NK_ONLY_SERIAL)
#define NK_BUILD_WASM 1
#else
#define NK_BUILD_WASM 0
#endif

/* Which rows it builds: the first versions that know a row's instructions. A row that is left out is listed as not
 * compiled, and the others are unharmed. MSVC switches instruction sets on by itself; it has no BF16 casts, and Windows
 * has no way to ask for AMX tiles. */
#define NK_NEVER_ 0x7fffffff
#if defined(__clang__)
#define NK_COMPILER_(gcc, clang, msvc) (__clang_major__ >= (clang))
#elif defined(__GNUC__)
#define NK_COMPILER_(gcc, clang, msvc) (__GNUC__ >= (gcc))
#elif defined(_MSC_VER)
#define NK_COMPILER_(gcc, clang, msvc) (_MSC_VER >= (msvc))
#else
#define NK_COMPILER_(gcc, clang, msvc) 0
#endif
#define NK_COMPILE_serial 1
#define NK_COMPILE_haswell (NK_BUILD_X86 && NK_COMPILER_(5, 8, 1920))
#define NK_COMPILE_alder (NK_BUILD_X86 && NK_COMPILER_(11, 12, 1930))
#define NK_COMPILE_icelake (NK_BUILD_X86 && NK_COMPILER_(8, 8, 1920))
#define NK_COMPILE_genoa (NK_BUILD_X86 && NK_COMPILER_(10, 9, NK_NEVER_))
#define NK_COMPILE_sapphireamx (NK_BUILD_X86 && NK_COMPILER_(11, 12, NK_NEVER_))
#define NK_COMPILE_neonsdot (NK_BUILD_ARM64 && NK_COMPILER_(8, 8, 1930))
#if defined(_WIN32) /* has no convention for ZA yet */
#define NK_COMPILE_sme 0
#else
#define NK_COMPILE_sme (NK_BUILD_ARM64 && NK_COMPILER_(14, 19, NK_NEVER_))
#endif
#if defined(__wasm_relaxed_simd__) /* an engine without it refuses the whole module, so the build decides */
#define NK_COMPILE_v128relaxed (NK_BUILD_WASM && NK_COMPILER_(NK_NEVER_, 16, NK_NEVER_))
#else
#define NK_COMPILE_v128relaxed 0
#endif

/* What a row's file defines. The kernels take validated arguments. */
typedef struct nk_backend_kernels_t {
    nk_u32_t tile_tokens; /* tokens in a tile of the screening plane; 0: no screening plane */
    nk_status_t (*pack)(nk_maxsim_pack_t const *job, nk_packed_header_t const *header);
    nk_status_t (*corpus)(nk_maxsim_corpus_t const *job);
    nk_status_t (*gradient)(nk_maxsim_gradient_t const *job);
    nk_status_t (*nearest)(nk_nearest_t const *job);
    nk_status_t (*squares)(nk_dtype_t dtype, void const *tokens, nk_size_t count, nk_size_t depth, nk_f64_t *squares);
    nk_u32_t coded_tokens; /* tokens in a tile of a coded packing, and what its codes are biased by */
    nk_u32_t coded_bias;
    nk_status_t (*coded)(nk_maxsim_corpus_t const *job);
    void (*decode)(void const *packed, nk_u64_t begin, nk_u64_t end, nk_f32_t *vectors);
} nk_backend_kernels_t;

typedef struct nk_backend_t {
    char const *name;
    nk_capability_t required;            /* every bit must be present */
    nk_u32_t layout;                     /* stamped into every buffer that it packs */
    nk_u32_t dtypes;                     /* bit 1 << nk_dtype_t for each type that it has */
    nk_backend_kernels_t const *kernels; /* null: not in this build */
    char const *absent;                  /* why not, as a sentence without a full stop; null when it is */
} nk_backend_t;

NK_PUBLIC nk_size_t nk_backend_count(void);
NK_PUBLIC nk_backend_t const *nk_backend_at(nk_size_t index);        /* in order of preference; null past the end */
NK_PUBLIC nk_backend_t const *nk_backend_by_layout(nk_u32_t layout); /* null when no row has it */
/* The first built row that needs no more than these capabilities and has the dtype; null when there is none. */
NK_PUBLIC nk_backend_t const *nk_backend_best(nk_dtype_t dtype, nk_capability_t capabilities);

/* The one function behind size, pack, score and unpack: fills a header for these counts, checksum included. */
NK_PUBLIC nk_status_t nk_packed_describe(nk_backend_t const *backend, nk_dtype_t dtype, nk_coding_t const *coding,
                                         nk_size_t documents, nk_size_t tokens, nk_size_t depth,
                                         nk_packed_header_t *header);
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
NK_REGION_(nk_f32_t, inverse_norm)
NK_REGION_(nk_u32_t, ids)
NK_REGION_(nk_u8_t, codebook)
#undef NK_REGION_

/* How a checked buffer is coded. */
static inline nk_coding_t nk_packed_coding(void const *packed) {
    nk_packed_header_t const *const header = (nk_packed_header_t const *)packed;
    nk_coding_t coding;
    coding.precision = header->flags & 0xff;
    coding.bits = header->flags >> 8;
    coding.centroids = header->centroids;
    return coding;
}

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
#define NK_PREFETCH_FAR(address) __builtin_prefetch(address, 0, 2) /* into the second-level cache */
#define NK_PREFETCH_WRITE(address) __builtin_prefetch(address, 1)
#else
#define NK_INLINE static inline
#define NK_NOINLINE static
#define NK_PREFETCH(address) ((void)(address))
#define NK_PREFETCH_FAR(address) ((void)(address))
#define NK_PREFETCH_WRITE(address) ((void)(address))
#endif

/* malloc; null also where an address has fewer bits than the size. */
NK_INLINE void *nk_allocate_(nk_size_t bytes) { return (size_t)bytes == bytes ? malloc((size_t)bytes) : NULL; }

/* Set bits of a word. */
NK_INLINE nk_u32_t nk_ones_(nk_u64_t bits) {
#if defined(__GNUC__)
    return (nk_u32_t)__builtin_popcountll(bits);
#else
    nk_u32_t count = 0;
    for (; bits; bits &= bits - 1) ++count;
    return count;
#endif
}

/* Position of the lowest set bit of a word that is not zero. */
NK_INLINE nk_u32_t nk_trailing_zeros_(nk_u64_t bits) {
#if defined(__GNUC__)
    return (nk_u32_t)__builtin_ctzll(bits);
#else
    nk_u32_t count = 0;
    for (nk_u32_t step = 32; step; step /= 2) {
        if (bits << (64 - step)) continue;
        bits >>= step;
        count += step;
    }
    return count;
#endif
}

/* What one pass over a row of screening values leaves: in each of 16 lanes the largest value and its token, and the
 * largest of what came second in a lane. While that stays below a floor, the lanes hold all that reaches it.
 *
 * On x86 a lane's token stands for four, 16 apart: a maximum of four values costs less than keeping track of each, and
 * which of the four it was is asked of the few that matter. */
typedef struct nk_leaders_t {
    nk_f32_t best[16];
    nk_u32_t token[16];
    nk_f32_t second;
} nk_leaders_t;
enum { nk_leader_stride_k = 16, nk_leader_span_k = 4 * nk_leader_stride_k };

/* Contiguous memory that will be needed, fetched line by line while something else is computed. */
typedef struct nk_coming_t {
    nk_u8_t const *at, *end;
} nk_coming_t;

NK_INLINE void nk_fetch_coming_(nk_coming_t *coming, nk_size_t lines) {
    for (; lines && coming->at < coming->end; --lines, coming->at += 64) NK_PREFETCH_FAR(coming->at);
}

/* Tokens that will be needed: where each starts, and how far fetching has come. */
typedef struct nk_ahead_t {
    nk_u8_t const **tokens;
    nk_size_t count, token_lines; /* lines of each token, at least one */
    nk_size_t next, line;         /* the line to fetch next is the next token's */
} nk_ahead_t;

NK_INLINE nk_ahead_t nk_fetch_nothing_(void) {
    nk_ahead_t const nothing = {NULL, 0, 1, 0, 0};
    return nothing;
}

NK_INLINE void nk_fetch_lines_(nk_ahead_t *ahead, nk_size_t lines) {
    nk_size_t next = ahead->next, line = ahead->line;
    for (; lines && next != ahead->count; --lines) {
        NK_PREFETCH_FAR(ahead->tokens[next] + line * 64);
        int const last = ++line == ahead->token_lines;
        next += (nk_size_t)last;
        line = last ? 0 : line;
    }
    ahead->next = next;
    ahead->line = line;
}

/* Lines to fetch in each of `steps` steps, so that they are spread evenly: a burst would hold up the kernel's own
 * loads. */
NK_INLINE nk_size_t nk_fetch_share_(nk_ahead_t const *ahead, nk_size_t steps) {
    return (ahead->count * ahead->token_lines + steps - 1) / steps;
}

#ifdef __cplusplus
}
#endif
#endif
