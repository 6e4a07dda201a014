/* numkong/packed.h: the packed format. One buffer holds one ragged collection; docs/packed-format.md describes it.
 *
 *   [ header 256 B | offsets u64 x (documents + 1) | documents: nk_packed_document_t x documents | square f64 x tokens
 *     | scale f32 x tokens | residual f32 x tokens | norm f32 x tokens | screening plane | originals ]
 *
 * Every region starts on a multiple of 64 bytes from the start of the buffer; everything is little-endian; there are no
 * pointers, so a buffer can be copied, mapped and sent. Tokens of all documents are contiguous and a tile of the
 * screening plane may span documents. */
#ifndef NUMKONG_PACKED_H
#define NUMKONG_PACKED_H

#include "types.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    nk_packed_header_bytes_k = 256,
    nk_packed_alignment_k = 64,       /* of regions, from the start of the buffer */
    nk_packed_base_alignment_k = 16,  /* of the buffer itself: what malloc gives */
    nk_packed_version_k = 1,
};
#define NK_PACKED_MAGIC 0x004b4341504b4eull /* "NKPACK" and two zero bytes, as a little-endian number */

typedef struct nk_packed_header_t {
    nk_u64_t magic;
    nk_u32_t version;
    nk_u32_t layout; /* id of the row that packed it */
    nk_u32_t dtype;  /* nk_dtype_t */
    nk_u32_t flags;  /* reserved, zero */
    nk_u64_t documents;
    nk_u64_t tokens;
    nk_u64_t depth;
    nk_u64_t total_bytes;
    nk_u64_t offsets_at; /* where each region starts, in bytes from the start of the buffer */
    nk_u64_t documents_at;
    nk_u64_t square_at;
    nk_u64_t scale_at;
    nk_u64_t residual_at;
    nk_u64_t norm_at;
    nk_u64_t screen_at;    /* equal to originals_at where the row has no screening plane */
    nk_u64_t originals_at; /* tokens x depth elements of dtype, bit for bit as given */
    nk_u64_t reserved[16]; /* zero */
    nk_u64_t checksum;     /* of the 248 bytes before it */
} nk_packed_header_t;

/* What screening and error bounds need of a whole document. Norms and ratios are rounded up, and infinite where a token
 * cannot be screened; a ratio is residual / norm, which the cosine metrics use. */
typedef struct nk_packed_document_t {
    nk_f32_t norm_max;
    nk_f32_t residual_max;
    nk_f32_t residual_sum; /* of the screenable tokens: tells a document with few bad tokens from one with many */
    nk_f32_t ratio_max;
    nk_f32_t ratio_sum;
    nk_u32_t flags; /* nk_document_*_k */
    nk_u32_t reserved[2];
} nk_packed_document_t;

enum {
    nk_document_unscreenable_k = 1, /* has a token that the screen cannot bound */
    nk_document_zero_k = 2,         /* has an all-zero token */
};

#ifdef __cplusplus
}
#endif
#endif
