/* v128relaxed.c: WebAssembly relaxed SIMD, i32x4.relaxed_dot_i8x16_i7x16_add. It sums four s8 x i7 products into 32
 * bits, and engines may treat its second operand as signed or unsigned and saturate the 16-bit pair sums or not.
 * Documents are therefore quantised to 7 bits and stored as 1..127, queries to 8 bits: a code means the same signed and
 * unsigned, and a pair sum is at most 2 * 127 * 127 = 32258 < 32768, so every engine gives the same bits.
 *
 * Tile: 8 document tokens (two vectors) x 4 query tokens: 8 accumulators, two documents, a broadcast and the product's
 * temporaries fit the 16 vector registers of an x86-64 host. Six of the demo's questions took Node 24 on Zen 3 at least
 * 60 ms, and 62 with 16 document tokens, 66 with 2 query tokens, 73 with 8.
 *
 * Multiply-adds may be fused or not: the f64 dots are of exact products, so both give the same bits, and the f32 second
 * screen's bound holds for both. */
#include <numkong/backend.h>

#if NK_COMPILE_v128relaxed
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <wasm_simd128.h>

#define NK_TILE_TOKENS_ 8
#define NK_QUERY_GROUP_ 4
#define NK_CODE_LIMIT_ 63
#define NK_CODE_BIAS_ 64
#define NK_PANEL_TILES_ 1
#define NK_CODED_BIAS_ 128
#define NK_CODED_PORTABLE_

#include "../kernels/wasm_v128.inc"
#include "../kernels/wasm_tile128.inc"
#include "../packing.inc"
#include "../scoring.inc"
#include "../coded.inc"
#include "../gradient.inc"
#include "../kernels/wasm_vector128.inc"
#include "../nearest.inc"

nk_backend_kernels_t const nk_backend_v128relaxed_kernels = {
    NK_TILE_TOKENS_, nk_pack_rows_,  nk_score_corpus_, nk_gradient_rows_, nk_nearest_rows_,
    nk_square_rows_, NK_CODED_TILE_, NK_CODED_BIAS_,   nk_score_coded_,   nk_decode_rows_,
};

#endif
