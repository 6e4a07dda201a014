/* kernels.c: the inner kernels of one row, called alone, so that kernels.py can hold them against the ceilings.
 * Compiled once a row, with the row's file as NK_ROW_FILE; what the row needs beyond its kernels is dropped by the
 * linker. */
#include NK_ROW_FILE

NK_PUBLIC int kernel_tile_tokens(void) { return NK_TILE_TOKENS_; }
NK_PUBLIC int kernel_query_group(void) { return NK_QUERY_GROUP_; }
NK_PUBLIC int kernel_code_limit(void) { return NK_CODE_LIMIT_; }
NK_PUBLIC int kernel_code_bias(void) { return NK_CODE_BIAS_; }
NK_PUBLIC int kernel_direct_halves(int dtype) { return NK_DIRECT_HALVES_((nk_dtype_t)dtype); }

NK_PUBLIC void kernel_screen(nk_u8_t const *plane, nk_size_t tiles, nk_f32_t const *scale, nk_u8_t const *queries,
                             nk_i32_t const *preset, nk_size_t groups, nk_size_t words, nk_f32_t *values,
                             nk_size_t value_stride) {
    nk_ahead_t nothing = nk_fetch_nothing_();
    nk_screen_(plane, tiles, scale, queries, preset, groups, words, values, value_stride, &nothing);
}

NK_PUBLIC void kernel_direct(int dtype, nk_u8_t const *plane, nk_size_t tiles, nk_f32_t const *scale,
                             nk_u8_t const *queries, nk_i32_t const *preset, nk_size_t groups, nk_size_t words,
                             nk_f32_t *values, nk_size_t value_stride) {
    nk_direct_((nk_dtype_t)dtype, plane, tiles, scale, queries, preset, groups, words, values, value_stride);
}
