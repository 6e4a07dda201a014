/* backend.c: builds the array of rows from backends.inc. */
#include <numkong/backend.h>

#define NK_BACKEND(name, architecture, layout, dtypes, required)                                                       \
    extern nk_backend_kernels_t const nk_backend_##name##_kernels;
#include <numkong/backends.inc>
#undef NK_BACKEND

/* The conditions are constants, so rows that are not compiled are not linked either. */
#define NK_KERNELS_(name) NK_COMPILE_##name ? &nk_backend_##name##_kernels : NULL
#define NK_ABSENT_(name, architecture)                                                                                 \
    NK_COMPILE_##name          ? NULL                                                                                  \
    : !NK_BUILD_##architecture ? "not this architecture"                                                               \
                               : "not compiled: the compiler of this build does not know its instructions"

static nk_backend_t const nk_backends_[] = {
#define NK_BACKEND(name, architecture, layout, dtypes, required)                                                       \
    {#name, required, layout, dtypes, NK_KERNELS_(name), NK_ABSENT_(name, architecture)},
#include <numkong/backends.inc>
#undef NK_BACKEND
};

nk_size_t nk_backend_count(void) { return sizeof(nk_backends_) / sizeof(nk_backends_[0]); }

nk_backend_t const *nk_backend_at(nk_size_t index) { return index < nk_backend_count() ? &nk_backends_[index] : NULL; }

nk_backend_t const *nk_backend_by_layout(nk_u32_t layout) {
    for (nk_size_t index = 0; index != nk_backend_count(); ++index)
        if (nk_backends_[index].layout == layout) return &nk_backends_[index];
    return NULL;
}

nk_backend_t const *nk_backend_best(nk_dtype_t dtype, nk_capability_t capabilities) {
    for (nk_size_t index = 0; index != nk_backend_count(); ++index) {
        nk_backend_t const *backend = &nk_backends_[index];
        if (!backend->kernels || !(backend->dtypes >> dtype & 1)) continue;
        if ((backend->required & capabilities) == backend->required) return backend;
    }
    return NULL;
}
