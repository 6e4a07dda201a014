/* numkong/packed.h: the packed format. One buffer holds one ragged collection; docs/packed-format.md describes it.
 *
 *   [ header 256 B | offsets u64 x (documents + 1) | documents: nk_packed_document_t x documents | square f64 x tokens
 *     | scale f32 x tokens | residual f32 x tokens | reach f32 x tokens | screening plane | originals ]
 *
 * A coded packing (int8, fp8, binary, residual) keeps no originals: a token is its scale times its code vector.
 *
 *   [ header 256 B | offsets | documents | scale f32 x tokens | inverse_norm f32 x tokens | plane of codes
 *     | ids u32 x tokens | codebook ]                                  the regions that its precision has
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
    nk_packed_alignment_k = 64,      /* of regions, from the start of the buffer */
    nk_packed_base_alignment_k = 16, /* of the buffer itself: what malloc gives */
    nk_packed_version_k = 1,
};
#define NK_PACKED_MAGIC 0x004b4341504b4eull /* "NKPACK" and two zero bytes, as a little-endian number */

typedef struct nk_packed_header_t {
    nk_u64_t magic;
    nk_u32_t version;
    nk_u32_t layout; /* id of the row that packed it */
    nk_u32_t dtype;  /* nk_dtype_t */
    nk_u32_t flags;  /* nk_precision_t | bits << 8: zero for an exact packing */
    nk_u64_t documents;
    nk_u64_t tokens;
    nk_u64_t depth;
    nk_u64_t total_bytes;
    nk_u64_t offsets_at; /* where each region starts, in bytes from the start of the buffer */
    nk_u64_t documents_at;
    nk_u64_t square_at;
    nk_u64_t scale_at;
    nk_u64_t residual_at;
    nk_u64_t reach_at;
    nk_u64_t screen_at;    /* screening plane, or the codes of a coded packing */
    nk_u64_t originals_at; /* tokens x depth elements of dtype, bit for bit as given; none in a coded packing */
    /* Of coded packings, else zero. */
    nk_u64_t inverse_norm_at;
    nk_u64_t ids_at;
    nk_u64_t codebook_at;
    nk_u64_t centroids;
    nk_u32_t tile_tokens;
    nk_u32_t code_bias;    /* added to int8 codes, which are stored unsigned */
    nk_u64_t code_bytes;   /* of a token in the plane */
    nk_u64_t reserved[10]; /* zero */
    nk_u64_t checksum;     /* of the 248 bytes before it */
} nk_packed_header_t;

/* What a packing keeps of a token. The values are stored in headers and never change. */
typedef enum nk_precision_t {
    nk_exact_k = 0,    /* all of it */
    nk_int8_k = 1,     /* 8-bit codes in [-127, 127] */
    nk_fp8_k = 2,      /* e4m3 codes */
    nk_binary_k = 3,   /* signs */
    nk_residual_k = 4, /* the number of a centroid, and `bits` for each element of the difference from it */
} nk_precision_t;

/* How a packing is coded; a null pointer stands for exact. */
typedef struct nk_coding_t {
    nk_u32_t precision; /* nk_precision_t */
    nk_u32_t bits;      /* of residual: 1, 2, 4 or 8; else 0 */
    nk_u64_t centroids; /* of residual; else 0 */
} nk_coding_t;

/* Deeper tokens are refused: an int32 dot of their codes could wrap. */
enum {
    nk_coded_depth_max_k = 131072,
    nk_binary_tile_tokens_k = 64,   /* on every row; other codes have tiles of the row's own size */
    nk_codebook_weights_at_k = 64,  /* after the scale (f32) and the bias (u8) of the weights' codes, one byte each */
    nk_codebook_head_bytes_k = 320, /* all that before the centroids' codes: 4 bytes for every 4 elements */
};

/* What screening and error bounds need of a whole document, all rounded up; infinite where a token cannot be screened.
 * A residual is the norm of what a token's codes leave over, its reach the norm of what they approximate: of the token,
 * or of its difference from the document's centre. Ratios are over the token's norm: the cosine metrics use them. */
typedef struct nk_packed_document_t {
    nk_f64_t norm_max; /* f64: the norm of a finite f32 token can exceed f32 */
    nk_f32_t norm_min; /* rounded up too; 0 without tokens */
    nk_f32_t residual_max;
    nk_f32_t residual_sum; /* of the screenable tokens: tells a document with few bad tokens from one with many */
    nk_f32_t reach_max;
    nk_f32_t residual_ratio_max;
    nk_f32_t residual_ratio_sum;
    nk_f32_t reach_ratio_max;
    nk_f32_t
        centre_spread; /* |centre| (1 / least norm - 1 / largest): what centring may shift one cosine against another */
    nk_u32_t flags;    /* nk_document_*_k */
    nk_u32_t reserved;
} nk_packed_document_t;

enum {
    nk_document_unscreenable_k = 1, /* has a token that the screen cannot bound; of a coded one, a NaN or an infinity */
    nk_document_centred_k = 2,      /* codes approximate differences from a centre */
};

#ifdef __cplusplus
}
#endif
#endif
