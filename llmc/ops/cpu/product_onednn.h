/*
The matrix product by oneDNN, 2.6 (Debian 12, Ubuntu 22.04) and 3.x: the matmul primitive, and for two layouts of fp32
dnnl_sgemm (only on x86-64: other machines may have reference code). The choice was measured (product.h). A primitive is
made once per shape and kept; its scratchpad is ours and shared. That bounds oneDNN's memory: below 3 MiB for the
primitives, below 20 MiB for dnnl_sgemm (2 threads), which packs its operands: wide products are cut.
*/
#ifndef LLMC_CPU_PRODUCT_ONEDNN_H
#define LLMC_CPU_PRODUCT_ONEDNN_H
#include <dnnl.h>
#include <dnnl_debug.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#include "product_plain.h"

#define KEPT_PRIMITIVES 128  // if there are more, the oldest is dropped: a training run reuses its shapes sooner
#define SGEMM_COLUMNS   2048 // most columns of an sgemm call

// Key of a primitive. Compared as bytes, so it has no padding.
typedef struct {
    size_t m, n, k, a_stride, out_stride;
    size_t a_transposed, b_transposed, out_summed, accumulate, bias;
} ProductShape;

enum { MATRIX_A, MATRIX_B, MATRIX_OUT, MATRIX_BIAS, SCRATCHPAD, ARGUMENTS };

typedef struct {
    ProductShape shape;
    dnnl_primitive_t primitive; // NULL: oneDNN has no primitive worth calling
    dnnl_memory_t memory[ARGUMENTS];
    size_t scratch_bytes;
} KeptPrimitive;

static struct {
    dnnl_engine_t engine;
    dnnl_stream_t stream;
    KeptPrimitive kept[KEPT_PRIMITIVES];
    size_t used, oldest;
    void *scratch;
    size_t scratch_bytes;
} onednn;

static void onednn_check(dnnl_status_t status, const char *call, const Product *p) {
    if (status != dnnl_success)
        die("oneDNN: %s for %s of [%zu,%zu] x [%zu,%zu] returned status %d (%s); ONEDNN=0 builds without oneDNN", call,
            p->op, p->m, p->k, p->k, p->n, (int)status, dnnl_status2str(status));
}
#define ONEDNN_CALL(call, arguments) onednn_check(call arguments, #call, p)

// ---- spelling of the two major versions ----------------------------------------------------------------------------
#if DNNL_VERSION_MAJOR >= 3
typedef dnnl_memory_desc_t MemoryDescription;
#define DESCRIPTION(md)         (md) // passes a description as an argument
#define DESTROY_DESCRIPTION(md) dnnl_memory_desc_destroy(md)
#define describe_memory         dnnl_memory_desc_create_with_strides
#define append_sum(ops)         dnnl_post_ops_append_sum(ops, 1.0f, 0, dnnl_data_type_undef)
#else
typedef dnnl_memory_desc_t MemoryDescription;
#define DESCRIPTION(md)         (&(md))
#define DESTROY_DESCRIPTION(md) dnnl_success
#define describe_memory         dnnl_memory_desc_init_by_strides
#define append_sum(ops)         dnnl_post_ops_append_sum(ops, 1.0f)
#endif

static dnnl_status_t describe_matmul(dnnl_primitive_desc_t *description, const MemoryDescription *a,
                                     const MemoryDescription *b, const MemoryDescription *bias,
                                     const MemoryDescription *out, const_dnnl_primitive_attr_t attributes) {
#if DNNL_VERSION_MAJOR >= 3
    return dnnl_matmul_primitive_desc_create(description, onednn.engine, *a, *b, bias ? *bias : NULL, *out, attributes);
#else
    dnnl_matmul_desc_t operation;
    dnnl_status_t status = dnnl_matmul_desc_init(&operation, a, b, bias, out);
    if (status != dnnl_success) return status;
    return dnnl_primitive_desc_create(description, &operation, attributes, onednn.engine, NULL);
#endif
}

// ---- the matmul primitive ------------------------------------------------------------------------------------------

// Describes a row-major matrix [rows,columns], or its transpose; stored rows are `stride` elements apart.
static MemoryDescription describe_matrix(const Product *p, size_t rows, size_t columns, size_t stride, int transposed,
                                         int summed) {
    const dnnl_dims_t size = {(dnnl_dim_t)rows, (dnnl_dim_t)columns};
    const dnnl_dims_t strides = {(dnnl_dim_t)(transposed ? 1 : stride), (dnnl_dim_t)(transposed ? stride : 1)};
    const dnnl_data_type_t type = summed || sizeof(floatX) == sizeof(floatS) ? dnnl_f32 : dnnl_bf16;
    MemoryDescription description;
    ONEDNN_CALL(describe_memory, (&description, 2, size, type, strides));
    return description;
}

static dnnl_memory_t memory_of(const Product *p, const MemoryDescription *description) {
    dnnl_memory_t memory;
    ONEDNN_CALL(dnnl_memory_create, (&memory, DESCRIPTION(*description), onednn.engine, DNNL_MEMORY_NONE));
    return memory;
}

// Makes the attributes. To accumulate, the primitive adds to out itself. A residual is copied to out first: faster than
// a "binary" post-op.
static dnnl_primitive_attr_t matmul_attributes(const Product *p) {
    dnnl_primitive_attr_t attributes;
    dnnl_post_ops_t added;
    ONEDNN_CALL(dnnl_primitive_attr_create, (&attributes));
    ONEDNN_CALL(dnnl_primitive_attr_set_scratchpad_mode, (attributes, dnnl_scratchpad_mode_user));
    ONEDNN_CALL(dnnl_post_ops_create, (&added));
    if (p->accumulate) onednn_check(append_sum(added), "dnnl_post_ops_append_sum", p);
    ONEDNN_CALL(dnnl_primitive_attr_set_post_ops, (attributes, added));
    ONEDNN_CALL(dnnl_post_ops_destroy, (added));
    return attributes;
}

// Returns whether an implementation is worth calling (product.h): not reference code, and no bf16 slower than ours. At
// an inner dimension of 63, AMX code of oneDNN 2.6 hits an illegal instruction (oneDNN's issue 1661).
static int onednn_is_fast(const char *implementation, const Product *p) {
    if (strstr(implementation, "ref")) return 0;
#if defined(PRECISION_BF16) && defined(__x86_64__) && !defined(ALWAYS_ONEDNN) // tests define ALWAYS_ONEDNN
    unsigned eax, ebx, ecx, edx;
    if (strstr(implementation, "amx")) return p->k != 63;
    if (!__get_cpuid(0, &eax, &ebx, &ecx, &edx)) return 0;
    unsigned intel = ebx == signature_INTEL_ebx;
    if (!__get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) || !(eax & 1u << 5)) return 0; // bit of AVX512-BF16
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return 0;
    return !(intel && edx & 1u << 23); // bit of AVX512-FP16: Sapphire Rapids and later
#else
    (void)p;
    return 1;
#endif
}

// Makes the primitive for p. Its .primitive stays NULL if oneDNN has none worth calling.
static void make_primitive(KeptPrimitive *kept, const Product *p) {
    MemoryDescription matrix[] = {
        describe_matrix(p, p->m, p->k, a_stride(p), p->a_transposed, 0),
        describe_matrix(p, p->k, p->n, p->b_transposed ? p->k : p->n, p->b_transposed, 0),
        describe_matrix(p, p->m, p->n, out_stride(p), 0, p->out_summed),
        describe_matrix(p, 1, p->n, p->n, 0, 0),
    };
    const MemoryDescription *bias = p->bias ? &matrix[MATRIX_BIAS] : NULL, *out = &matrix[MATRIX_OUT];
    dnnl_primitive_attr_t attributes = matmul_attributes(p);
    dnnl_primitive_desc_t matmul;
    const char *implementation;
    if (describe_matmul(&matmul, &matrix[MATRIX_A], &matrix[MATRIX_B], bias, out, attributes) == dnnl_success) {
        ONEDNN_CALL(dnnl_primitive_desc_query, (matmul, dnnl_query_impl_info_str, 0, (void *)&implementation));
        if (onednn_is_fast(implementation, p)) {
            kept->scratch_bytes =
                dnnl_memory_desc_get_size(dnnl_primitive_desc_query_md(matmul, dnnl_query_scratchpad_md, 0));
            ONEDNN_CALL(dnnl_primitive_create, (&kept->primitive, matmul));
            for (size_t i = 0; i <= MATRIX_BIAS; i++) kept->memory[i] = memory_of(p, &matrix[i]);
            ONEDNN_CALL(dnnl_memory_create,
                        (&kept->memory[SCRATCHPAD], dnnl_primitive_desc_query_md(matmul, dnnl_query_scratchpad_md, 0),
                         onednn.engine, DNNL_MEMORY_NONE));
        }
        ONEDNN_CALL(dnnl_primitive_desc_destroy, (matmul));
    }
    ONEDNN_CALL(dnnl_primitive_attr_destroy, (attributes));
    for (size_t i = 0; i <= MATRIX_BIAS; i++) ONEDNN_CALL(DESTROY_DESCRIPTION, (matrix[i]));
}

static void forget_primitive(KeptPrimitive *kept, const Product *p) {
    if (!kept->primitive) return;
    for (size_t i = 0; i < ARGUMENTS; i++) ONEDNN_CALL(dnnl_memory_destroy, (kept->memory[i]));
    ONEDNN_CALL(dnnl_primitive_destroy, (kept->primitive));
}

// Returns the primitive of p's shape. Makes it if it is not kept; it replaces the oldest if all slots are used.
static KeptPrimitive *find_primitive(const Product *p) {
    const size_t stride_a = a_stride(p), stride_out = out_stride(p);
    const ProductShape shape = {p->m,
                                p->n,
                                p->k,
                                stride_a,
                                stride_out,
                                p->a_transposed != 0,
                                p->b_transposed != 0,
                                p->out_summed != 0,
                                p->accumulate != 0,
                                p->bias != NULL};
    KeptPrimitive *kept;
    for (size_t i = 0; i < onednn.used; i++)
        if (!memcmp(&onednn.kept[i].shape, &shape, sizeof(shape))) return &onednn.kept[i];
    if (onednn.used < KEPT_PRIMITIVES)
        kept = &onednn.kept[onednn.used++];
    else {
        kept = &onednn.kept[onednn.oldest++ % KEPT_PRIMITIVES];
        forget_primitive(kept, p);
    }
    memset(kept, 0, sizeof(*kept));
    kept->shape = shape;
    make_primitive(kept, p);
    return kept;
}

static void *onednn_scratch(size_t bytes) {
    if (bytes > onednn.scratch_bytes) {
        cpu_release(onednn.scratch, onednn.scratch_bytes);
        onednn.scratch = cpu_allocate(bytes);
        onednn.scratch_bytes = bytes;
        if (!onednn.scratch) die("out of memory: %zu bytes wanted for oneDNN's scratchpad; free some memory", bytes);
    }
    return onednn.scratch;
}

static int onednn_matmul(const Product *p) {
    static const int names[ARGUMENTS] = {DNNL_ARG_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_DST, DNNL_ARG_BIAS,
                                         DNNL_ARG_SCRATCHPAD};
    KeptPrimitive *kept = find_primitive(p);
    const void *data[ARGUMENTS] = {p->a, p->b, p->out, p->bias, NULL};
    dnnl_exec_arg_t arguments[ARGUMENTS];
    int count = 0;
    if (!kept->primitive) return 0;
    if (kept->scratch_bytes) data[SCRATCHPAD] = onednn_scratch(kept->scratch_bytes);
    for (size_t i = 0; i < ARGUMENTS; i++) {
        if (data[i]) ONEDNN_CALL(dnnl_memory_set_data_handle, (kept->memory[i], (void *)data[i]));
        if (data[i] || i == SCRATCHPAD) arguments[count++] = (dnnl_exec_arg_t){names[i], kept->memory[i]};
    }
    ONEDNN_CALL(dnnl_primitive_execute, (kept->primitive, onednn.stream, count, arguments));
    ONEDNN_CALL(dnnl_stream_wait, (onednn.stream));
    return 1;
}

// ---- both ----------------------------------------------------------------------------------------------------------

// Returns whether oneDNN serves this build on this processor. Tries once, on a product of medium size.
static int onednn_serves(void) {
    static int asked, serves;
    static const Product probe = {.op = "a first trial", .m = 256, .n = 256, .k = 256, .b_transposed = 1};
    const Product *p = &probe;
    if (asked) return serves;
    asked = 1;
    if (dnnl_engine_create(&onednn.engine, dnnl_cpu, 0) != dnnl_success) return 0;
    ONEDNN_CALL(dnnl_stream_create, (&onednn.stream, onednn.engine, dnnl_stream_default_flags));
    ONEDNN_CALL(dnnl_set_primitive_cache_capacity, (0)); // oneDNN's cache would keep primitives that we drop
    serves = find_primitive(p)->primitive != NULL;
    return serves;
}

// Computes the product with oneDNN. Returns 0 if product_plain must compute it.
static int product_onednn(const Product *p) {
    if (!onednn_serves()) return 0;
#if !defined(PRECISION_BF16) && defined(__x86_64__)
    if (!p->b_transposed && !p->bias && !p->residual) {
        for (size_t j = 0; j < p->n; j += SGEMM_COLUMNS)
            ONEDNN_CALL(dnnl_sgemm, (p->a_transposed ? 'T' : 'N', 'N', (dnnl_dim_t)p->m,
                                     (dnnl_dim_t)min_size(SGEMM_COLUMNS, p->n - j), (dnnl_dim_t)p->k, 1.0f, p->a,
                                     (dnnl_dim_t)a_stride(p), p->b + j, (dnnl_dim_t)p->n, p->accumulate ? 1.0f : 0.0f,
                                     (float *)p->out + j, (dnnl_dim_t)out_stride(p)));
        return 1;
    }
#endif
    if (!p->residual) return onednn_matmul(p);
    Product sum = *p;
    sum.residual = NULL, sum.accumulate = 1;
    if (!find_primitive(&sum)->primitive) return 0;
#pragma omp parallel for schedule(static)
    for (size_t r = 0; r < p->m; r++)
        memcpy((floatX *)p->out + r * out_stride(p), p->residual + r * out_stride(p), p->n * sizeof(floatX));
    return onednn_matmul(&sum);
}

#endif
