/*
The checks of the verb `doctor`: every op of a pass and of an optimizer's step, at the shapes of a model, held against
ops_reference.h. A check makes an op's tensors and calls it; the same line then calls the reference, whose tensors are a
sample of the op's (doctor_check.h). An op of op_list.h without a check does not compile.
*/
#ifndef LLMC_DOCTOR_OPS_H
#define LLMC_DOCTOR_OPS_H
#include "doctor_check.h"
#include "doctor_linear.h"
#include "llmc/model/config.h"

// ---- ops: `c` is a model, n tokens --------------------------------------------------------------------------------
static void check_embedding_forward(const Config *c, size_t n) {
    check_begin("%zu x %zu of %zu", n, c->hidden_size, c->vocab_size);
    const Dim N = some_of(n, 40), C = some_of(c->hidden_size, 32), V = all_of(c->vocab_size);
    const int learned = c->family->learned_positions;
    const Dim P = all_of(min_size(n, c->max_position_embeddings));
    Tensor *tokens = tensor_indices("tokens", N, V.size, 0), *position = tensor_indices("position", N, P.size, 0);
    Tensor *wte = tensor_in("wte", V, C), *wpe = learned ? tensor_in("wpe", P, C) : NULL,
           *out = tensor_out("out", N, C);
    CHECK(embedding_forward, of(out), of(tokens), of(position), of(wte), of(wpe), len(N), len(C), 1.5);
    expect(out, 0);
}

static void check_embedding_backward(const Config *c, size_t n) {
    check_begin("%zu x %zu of %zu", n, c->hidden_size, c->vocab_size);
    const Dim N = all_of(n), C = some_of(c->hidden_size, 32), V = all_of(c->vocab_size);
    Tensor *index = tensor_indices("index", N, V.size, 0), *dx = tensor_in("dx", N, C), *dw = tensor_sums("dw", V, C);
    Tensor *scratch = tensor_scratch(check.ops->embedding_backward_scratch(n, V.size, C.size));
    CHECK(embedding_backward, of(dw), dw->type, of(dx), of(index), len(N), len(V), len(C), 1.5, V.size / 3,
          of(scratch));
    expect(dw, 1);
}

static void check_scatter_rows(const Config *c, size_t n) {
    check_begin("%zu x %zu", n, c->hidden_size);
    const Dim N = all_of(n), twice = all_of(2 * n), C = some_of(c->hidden_size, 32);
    int32_t *row = (int32_t *)check_allocate(n * sizeof(int32_t));
    for (size_t i = 0; i < n; i++) row[i] = (int32_t)(2 * (n - 1 - i) + i % 2);
    Tensor *rows = tensor_given(TENSOR_READ, "row", DTYPE_FP32, N, all_of(1), row), *in = tensor_in("in", N, C);
    Tensor *out = tensor_inout("out", twice, C);
    rows->raw = 1;
    CHECK(scatter_rows, of(out), of(in), of(rows), len(N), len(C));
    expect(out, 0);
}

static void check_dequantise(const Config *c, size_t n) {
    const DType rounding[] = {DTYPE_FP32, DTYPE_BF16, DTYPE_FP16};
    const size_t count = min_size(n * c->hidden_size, 100003);
    float *values = (float *)checked_malloc(count * sizeof(float), "a check");
    for (size_t i = 0; i < count; i++) values[i] = (float)normal_of(random_mix(i));
    for (size_t i = 0; i < 3; i++) {
        const QuantFormat format = {i ? QUANT_NF4 : QUANT_FP4, i != 1, QUANT_BLOCK, rounding[i]};
        check_begin("%s %zu", quant_type_names[format.type], count);
        const size_t words = quant_parts(format, count).bytes / sizeof(float);
        uint8_t *record = (uint8_t *)check_allocate(words * sizeof(float));
        quant_encode(record, format, values, count);
        Tensor *in = tensor_given(TENSOR_READ, "record", DTYPE_FP32, all_of(words), all_of(1), record);
        Tensor *out = tensor_out("out", all_of(1), all_of(count));
        in->raw = 1;
        CHECK(dequantise, of(out), of(in), &format, count);
        expect(out, 0);
    }
    free(values);
}

// The model's norm, and that of its heads.
static size_t norm_shapes(const Config *c, size_t n, size_t shape[2][2]) {
    shape[0][0] = n, shape[0][1] = c->hidden_size;
    shape[1][0] = n * c->num_attention_heads, shape[1][1] = c->head_dim;
    return c->family->qk_norm ? 2 : 1;
}

static Norm norm_of_model(const Config *c) {
    const Norm norm = {c->norm_eps, c->family->norm_offset ? 1.0 : 0.0, c->family->norm};
    return norm;
}

static void check_norm_forward(const Config *c, size_t n) {
    const Norm norm = norm_of_model(c);
    size_t shape[2][2];
    for (size_t i = 0, shapes = norm_shapes(c, n, shape); i < shapes; i++) {
        check_begin("%zu x %zu", shape[i][0], shape[i][1]);
        const Dim N = some_of(shape[i][0], 60), C = all_of(shape[i][1]), one = all_of(1);
        Tensor *x = tensor_in("x", N, C), *w = tensor_in("w", one, C), *out = tensor_out("out", N, C);
        Tensor *b = norm.kind == NORM_LAYER ? tensor_in("b", one, C) : NULL;
        Tensor *residual = b ? NULL : tensor_in("residual", N, C);
        CHECK(norm_forward, of(out), of(x), of(w), of(b), of(residual), len(N), len(C), norm);
        expect(out, 0);
    }
}

static void check_norm_backward(const Config *c, size_t n) {
    const Norm norm = norm_of_model(c);
    size_t shape[2][2];
    for (size_t i = 0, shapes = norm_shapes(c, n, shape); i < shapes; i++) {
        check_begin("%zu x %zu", shape[i][0], shape[i][1]);
        const Dim N = all_of(shape[i][0]), C = all_of(shape[i][1]), one = all_of(1);
        Tensor *x = tensor_in("x", N, C), *w = tensor_in("w", one, C), *dout = tensor_in("dout", N, C);
        Tensor *dx = tensor_inout("dx", N, C), *dw = tensor_sums("dw", one, C);
        Tensor *db = norm.kind == NORM_LAYER ? tensor_sums("db", one, C) : NULL;
        Tensor *scratch = tensor_scratch(check.ops->norm_backward_scratch(N.size, C.size));
        CHECK(norm_backward, of(dx), of(dw), of(db), of(dout), of(x), of(w), len(N), len(C), norm, i == 0, of(scratch));
        expect(dx, 1);
        expect(dw, sqrt((double)N.size));
        expect(db, sqrt((double)N.size));
    }
}

// ---- products ------------------------------------------------------------------------------------------------------
// One of the model's products: n tokens, C columns in, OC out, which stand behind `before` others in rows of `stride`
// elements. The last two are an adapter of rank 16 on the keys' columns, and the head, whose rows are padded.
typedef struct {
    size_t n, C, OC, before, stride;
    Dim left, whole; // columns before, and all columns, of the sample
} Product;
enum { PRODUCTS = 6 };

static Product product_of(const Config *c, size_t n, size_t i) {
    const size_t C = c->hidden_size, FF = c->intermediate_size, V = c->vocab_size, few = min_size(n, 40);
    const size_t q = c->num_attention_heads * c->head_dim, kv = c->num_key_value_heads * c->head_dim;
    const size_t up = activation_width(c->family->activation, FF), all = q + 2 * kv;
    const size_t products[PRODUCTS][5] = {{n, C, all, 0, all}, {n, q, C, 0, C},     {n, C, up, 0, up},
                                          {n, FF, C, 0, C},    {n, 16, kv, q, all}, {few, C, V, 0, V / 8 * 8 + 8}};
    Product p = {0};
    p.n = products[i][0], p.C = products[i][1], p.OC = products[i][2];
    p.before = products[i][3], p.stride = products[i][4];
    check_begin("%zux%zux%zu", p.n, p.C, p.OC);
    return p;
}

// The sample of a row: columns OC of the product, and some on either side, which must stay as they are.
static void product_columns(Product *p, Dim OC) {
    const size_t behind = p->before + p->OC;
    const Dim left = some_of(p->before, 16), right = some_of(p->stride - behind, 16);
    size_t *at = (size_t *)check_allocate((left.count + OC.count + right.count) * sizeof(size_t)), count = 0;
    for (size_t i = 0; i < left.count; i++) at[count++] = dim_at(left, i);
    for (size_t i = 0; i < OC.count; i++) at[count++] = p->before + dim_at(OC, i);
    for (size_t i = 0; i < right.count; i++) at[count++] = behind + dim_at(right, i);
    const Dim whole = {p->stride, count, at};
    p->left = left, p->whole = whole;
}

// The product's columns of a tensor of such rows.
static AnyPointer columns_of_product(const Tensor *t, const Product *p) {
    char *memory = (char *)of(t);
    const AnyPointer columns = {!t ? NULL
                                   : (void *)(memory + len(p->left) * (check.on_reference ? 8 : dtype_size(t->type)))};
    return columns;
}

static void check_linear_forward(const Config *c, size_t n) {
    for (size_t i = 0; i < PRODUCTS; i++) {
        Product p = product_of(c, n, i);
        const Dim N = some_of(p.n, 32), C = all_of(p.C), OC = some_of(p.OC, 48), one = all_of(1);
        product_columns(&p, OC);
        const int added = i % 2 == 1;
        Tensor *x = tensor_in("x", N, C), *weight = tensor_in("weight", OC, C),
               *out = tensor_make(p.stride == p.OC ? TENSOR_WRITTEN : TENSOR_CHANGED, "out", check.ops->stored, N,
                                  p.whole);
        Tensor *bias = i % 2 ? NULL : tensor_in("bias", one, OC),
               *residual = added ? tensor_in("residual", N, p.whole) : NULL;
        check.terms = p.C, check.joins = 1;
        CHECK(linear_forward, columns_of_product(out, &p), of(x), of(weight), of(bias),
              columns_of_product(residual, &p), len(N), len(C), len(OC), len(p.whole));
        expect(out, sqrt((double)p.C));
    }
}

// Fewer columns out: all of a record is decoded
static void check_linear_forward_quantised(const Config *c, size_t n) {
    const QuantFormat format = {QUANT_NF4, 1, QUANT_BLOCK, DTYPE_BF16};
    const Dim N = all_of(min_size(n, 9)), C = all_of(c->hidden_size), OC = all_of(min_size(c->intermediate_size, 100));
    check_begin("%zux%zux%zu", N.size, C.size, OC.size);
    const size_t count = C.size * (OC.size + 1), words = quant_parts(format, count).bytes / sizeof(float);
    float *values = (float *)checked_malloc(count * sizeof(float), "a check");
    for (size_t i = 0; i < count; i++) values[i] = (float)normal_of(random_mix(i));
    uint8_t *record = (uint8_t *)check_allocate(words * sizeof(float));
    quant_encode(record, format, values, count);
    free(values);
    Tensor *in = tensor_given(TENSOR_READ, "record", DTYPE_FP32, all_of(words), all_of(1), record);
    Tensor *x = tensor_in("x", N, C), *bias = tensor_in("bias", all_of(1), OC),
           *residual = tensor_in("residual", N, OC), *out = tensor_out("out", N, OC);
    in->raw = 1;
    check.terms = C.size;
    CHECK(linear_forward_quantised, of(out), of(x), of(in), &format, OC.size + 1, 1, of(bias), of(residual), len(N),
          len(C), len(OC), len(OC));
    expect(out, sqrt((double)C.size));
}

static void check_linear_backward_input(const Config *c, size_t n) {
    for (size_t i = 0; i < PRODUCTS; i++) {
        Product p = product_of(c, n, i);
        const Dim N = some_of(p.n, 32), C = some_of(p.C, 48), OC = all_of(p.OC);
        product_columns(&p, OC);
        Tensor *dout = tensor_in("dout", N, p.whole), *weight = tensor_in("weight", OC, C),
               *dx = tensor_inout("dx", N, C);
        check.terms = p.OC, check.joins = 1;
        CHECK(linear_backward_input, of(dx), columns_of_product(dout, &p), of(weight), len(N), len(C), len(OC),
              len(p.whole), 1);
        expect(dx, sqrt((double)p.OC));
    }
}

static void check_linear_backward_weight(const Config *c, size_t n) {
    for (size_t i = 0; i < PRODUCTS; i++) {
        Product p = product_of(c, n, i);
        const Dim N = all_of(p.n), C = some_of(p.C, 48), OC = some_of(p.OC, 48), one = all_of(1);
        product_columns(&p, OC);
        Tensor *dout = tensor_in("dout", N, p.whole), *x = tensor_in("x", N, C),
               *dweight = tensor_sums("dweight", OC, C);
        Tensor *dbias = i % 2 ? NULL : tensor_sums("dbias", one, OC);
        check.terms = p.n;
        CHECK(linear_backward_weight, of(dweight), of(dbias), columns_of_product(dout, &p), of(x), len(N), len(C),
              len(OC), len(p.whole));
        expect(dweight, sqrt((double)p.n));
        expect(dbias, sqrt((double)p.n));
    }
}

static void check_scale(const Config *c, size_t n) {
    check_begin("%zu x %zu", n, c->hidden_size);
    const Dim count = some_of(n * c->hidden_size, 4000);
    Tensor *x = tensor_inout("x", all_of(1), count);
    CHECK(scale, of(x), x->type, 0.3, len(count));
    expect(x, 0);
}

static void check_dropout(const Config *c, size_t n) {
    const size_t some = min_size(n, 40);
    check_begin("%zu x %zu", n, c->hidden_size);
    // the last rows: an element's fate goes by its number
    const Dim C = all_of(c->hidden_size), N = columns_of(all_of(some), 1, n - some, n);
    Tensor *in = tensor_in("in", N, C), *out = tensor_inout("out", N, C);
    CHECK(dropout, of(out), of(in), len(N), len(C), 7 + (check.on_reference ? n - some : 0), 0.1, 3, 1);
    expect(out, 0);
}

static void check_rope(const Config *c, size_t n) {
    check_begin("%zu x %zu x %zu", n, c->num_attention_heads, c->head_dim);
    const size_t NH = c->num_attention_heads, HD = c->head_dim, R = rotary_width(c) / 2 * 2;
    const Dim N = some_of(n, 40), width = all_of(NH * HD), half = all_of(R / 2);
    float *inverse = (float *)check_allocate(half.size * sizeof(float));
    for (size_t i = 0; i < half.size; i++) inverse[i] = (float)pow(1e6, -2.0 * (double)i / (double)R);
    Tensor *x = tensor_inout("x", N, width), *position = tensor_indices("position", N, 131072, 0);
    Tensor *frequency = tensor_given(TENSOR_READ, "inverse_frequency", DTYPE_FP32, half, all_of(1), inverse);
    frequency->raw = 1;
    CHECK(rope, of(x), of(position), of(frequency), len(N), NH, HD, R, rotation_of(c, 0, 1), 0);
    expect(x, 0);
}

// A chunk of n queries at the end of 2n tokens: the rest of a document whose first keys came before, a short one, and
// one more. In the sample a span is a query, or (backward) all of them and the query heads of one key head, whose
// gradients are sums over the queries.
typedef struct {
    AttentionShape shape, sample;
    Dim rows, keys, queries, values, heads; // of q; of k; columns of q and out, of k and v, of lse
} AttentionCase;

static AttentionCase attention_case(const Config *c, size_t n, size_t window, int backward) {
    const size_t NH = c->num_attention_heads, NKV = c->num_key_value_heads, HD = c->head_dim, group = NH / NKV;
    const size_t cut[4] = {0, n - n / 8 - n / 4, n - n / 4, n};
    const AttentionShape shape = {{NULL, 0, window, 0}, NH, NKV, HD, 1 / sqrt((double)HD), all_keys, 0, 0};
    Span *span = (Span *)check_allocate(3 * sizeof(Span)), *each = (Span *)check_allocate(n * sizeof(Span));
    size_t *own = (size_t *)check_allocate(sizeof(size_t));
    *own = check_below(NKV);
    const Dim one = {NKV, 1, own}, H = !backward ? some_of(NKV, 4) : n > 64 ? one : all_of(NKV);
    AttentionCase a = {0};
    a.shape = a.sample = shape;
    a.sample.NH = H.count * group, a.sample.NKV = H.count;
    a.rows = backward ? all_of(n) : some_of(n, 24), a.keys = all_of(2 * n);
    a.heads = columns_of(H, group, 0, NH), a.queries = columns_of(a.heads, HD, 0, NH * HD);
    a.values = columns_of(H, HD, 0, NKV * HD);
    for (size_t s = 0; s < 3; s++) { // below 8 queries some are empty
        const Span whole = {s ? n + cut[s] : 0, n + cut[s], n + cut[s + 1], cut[s]};
        if (cut[s] < cut[s + 1]) span[a.shape.spans.count++] = whole;
    }
    a.shape.spans.span = a.sample.spans.span = span, a.sample.spans.count = a.shape.spans.count;
    if (backward) return a;
    for (size_t i = 0; i < a.rows.count; i++) {
        const size_t row = dim_at(a.rows, i), s = row < cut[1] ? 0 : row < cut[2] ? 1 : 2;
        const Span query = {s ? n + cut[s] : 0, n + row, n + row + 1, i};
        each[i] = query;
    }
    a.sample.spans.span = each, a.sample.spans.count = a.rows.count;
    return a;
}

// Range `range` of two, as when ranks pass keys round.
static void attention_range(AttentionCase *a, int range) {
    const size_t middle = a->keys.size / 2 + a->keys.size / 5;
    a->shape.partial = 1, a->shape.accumulate = range;
    a->shape.keys.begin = range ? 0 : middle, a->shape.keys.end = range ? middle : SIZE_MAX;
}

// dout . v - delta: two sums of HD products, which nearly cancel in short documents.
static double attention_error(const Config *c) {
    const double error = check_arithmetic(1);
    return error * fmax(1, sqrt((double)c->head_dim / 128)) * (error > 1e-4 ? 2 : 1);
}

// 0: as most passes; 1: keys in two ranges; 2: in a window, where the model has one
static AttentionCase attention_begin(const Config *c, size_t n, int kind, int backward) {
    check_begin("%zu of %zu keys%s", n, 2 * n, kind == 1 ? " in two ranges" : kind == 2 ? " in a window" : "");
    return attention_case(c, n, kind == 2 ? n / 3 + 1 : 0, backward);
}

static int attention_kinds(const Config *c) { return c->sliding_window ? 3 : 2; }

static void check_attention_forward(const Config *c, size_t n) {
    for (int kind = 0; kind < attention_kinds(c); kind++) {
        AttentionCase a = attention_begin(c, n, kind, 0);
        const DType type = kind == 1 ? check.ops->summed : check.ops->stored;
        Tensor *q = tensor_in("q", a.rows, a.queries), *k = tensor_in("k", a.keys, a.values);
        Tensor *v = tensor_in("v", a.keys, a.values),
               *out = tensor_make(TENSOR_WRITTEN, "out", type, a.rows, a.queries);
        Tensor *lse = tensor_make(TENSOR_WRITTEN, "lse", check.ops->summed, a.rows, a.heads);
        Tensor *scratch = tensor_scratch(check.ops->attention_scratch(n, a.shape.NH, a.shape.NKV, a.shape.HD));
        ON_DEVICE(for (int range = 0; range < (kind == 1 ? 2 : 1); range++) {
            if (kind == 1) attention_range(&a, range);
            check.ops->attention_forward(of(out), of(lse), of(q), of(k), of(v), &a.shape, of(scratch));
        });
        ON_REFERENCE(reference_attention_forward(of(out), of(lse), of(q), of(k), of(v), &a.sample, NULL));
        expect_close(out, attention_error(c), 0);
        expect_close(lse, attention_error(c), 1);
    }
}

// From now on the op set finds in a tensor what it has put there.
static void tensor_keep(Tensor *t) {
    void *elements = check_allocate(tensor_bytes(t));
    check.ops->copy_out(elements, t->memory + GUARD, tensor_bytes(t));
    t->given = elements, t->use = TENSOR_READ;
}

static void check_attention_backward(const Config *c, size_t n) {
    for (int kind = 0; kind < attention_kinds(c); kind++) {
        AttentionCase a = attention_begin(c, n, kind, 1);
        const DType type = kind == 1 ? check.ops->summed : check.ops->stored;
        Tensor *q = tensor_in("q", a.rows, a.queries), *k = tensor_in("k", a.keys, a.values);
        Tensor *v = tensor_in("v", a.keys, a.values), *out = tensor_out("out", a.rows, a.queries);
        Tensor *lse = tensor_make(TENSOR_WRITTEN, "lse", check.ops->summed, a.rows, a.heads);
        Tensor *scratch = tensor_scratch(check.ops->attention_scratch(n, a.shape.NH, a.shape.NKV, a.shape.HD));
        ON_DEVICE(check.ops->attention_forward(of(out), of(lse), of(q), of(k), of(v), &a.shape, of(scratch)));
        tensor_keep(out), tensor_keep(lse);
        Tensor *dout = tensor_in("dout", a.rows, a.queries);
        Tensor *dq = tensor_make(TENSOR_WRITTEN, "dq", type, a.rows, a.queries);
        Tensor *dk = tensor_sums("dk", a.keys, a.values), *dv = tensor_sums("dv", a.keys, a.values);
        ON_DEVICE(for (int range = 0; range < (kind == 1 ? 2 : 1); range++) {
            if (kind == 1) attention_range(&a, range);
            check.ops->attention_backward(of(dq), of(dk), of(dv), of(dout), of(out), of(q), of(k), of(v), of(lse),
                                          &a.shape, of(scratch));
        });
        ON_REFERENCE(reference_attention_backward(of(dq), of(dk), of(dv), of(dout), of(out), of(q), of(k), of(v),
                                                  of(lse), &a.sample, NULL));
        expect_close(dq, attention_error(c), 0.3);
        expect_close(dk, attention_error(c), 0.3);
        expect_close(dv, attention_error(c), 0.3);
    }
}

static void check_activation_forward(const Config *c, size_t n) {
    const ActivationKind kind = c->family->activation;
    check_begin("%zu x %zu", n, c->intermediate_size);
    const Dim N = some_of(n, 40), FF = all_of(c->intermediate_size), width = all_of(activation_width(kind, FF.size));
    Tensor *in = tensor_in("in", N, width), *out = tensor_out("out", N, FF);
    CHECK(activation_forward, of(out), of(in), kind, len(N), len(FF));
    expect(out, 0);
}

static void check_activation_backward(const Config *c, size_t n) {
    const ActivationKind kind = c->family->activation;
    check_begin("%zu x %zu", n, c->intermediate_size);
    const Dim N = some_of(n, 40), FF = all_of(c->intermediate_size), width = all_of(activation_width(kind, FF.size));
    Tensor *in = tensor_in("in", N, width), *dout = tensor_in("dout", N, FF), *din = tensor_out("din", N, width);
    CHECK(activation_backward, of(din), of(dout), of(in), kind, len(N), len(FF));
    expect(din, 0);
}

static void check_logprob(const Config *c, size_t n) {
    check_begin("%zu x %zu", min_size(n, 40), c->vocab_size);
    const Dim N = some_of(min_size(n, 40), 16), V = all_of(c->vocab_size), row = all_of(V.size / 8 * 8 + 8),
              one = all_of(1);
    Tensor *logits = tensor_inout("logits", N, row), *targets = tensor_indices("targets", N, V.size, 1);
    Tensor *weight = tensor_make(TENSOR_READ, "weight", check.ops->summed, N, one);
    Tensor *logp = tensor_make(TENSOR_WRITTEN, "logp", check.ops->summed, N, one);
    Tensor *entropy = tensor_make(TENSOR_WRITTEN, "entropy", check.ops->summed, N, one);
    CHECK(logprob, of(logp), of(entropy), of(logits), of(targets), of(weight), len(N), len(V), len(row), 0.9);
    expect(logp, 3);
    expect(entropy, 1);
    expect(logits, 0);
}

static void check_round_sums(const Config *c, size_t n) {
    check_begin("%zu x %zu", n, c->hidden_size);
    const Dim count = some_of(n * c->hidden_size, 4000), one = all_of(1);
    Tensor *in = tensor_make(TENSOR_READ, "in", check.ops->summed, one, count), *out = tensor_out("out", one, count);
    CHECK(round_sums, of(out), of(in), len(count));
    expect(out, 0);
}

static void check_draw(const Config *c, size_t n) {
    static const SamplingSettings settings[] = {{0, 0, 1, 0}, {1, 0, 1, 0}, {0.7, 50, 0.95, 0}};
    for (size_t i = 0; i < 3; i++) {
        check_begin("%zu x %zu", min_size(n, 3), c->vocab_size);
        const Dim N = all_of(min_size(n, 3)), V = all_of(c->vocab_size), row = all_of(V.size / 8 * 8 + 8),
                  one = all_of(1);
        double uniform[3];
        for (size_t t = 0; t < 3; t++) uniform[t] = random_uniform(7, i, t);
        Tensor *logits = tensor_in("logits", N, row), *scratch = tensor_scratch(check.ops->draw_scratch(V.size));
        Tensor *number = tensor_given(TENSOR_READ, "uniform", DTYPE_FP64, N, one, uniform);
        Tensor *token = tensor_make(TENSOR_WRITTEN, "token", DTYPE_FP32, N, one);
        CHECK(draw, of(token), of(logits), of(number), len(N), len(V), len(row), &settings[i], of(scratch));
        for (size_t t = 0; t < N.size; t++) {
            const float found = (float)token->found[t]; // the bits of an id
            int32_t id, expected = ((const int32_t *)token->twin)[t];
            memcpy(&id, &found, sizeof(id));
            if (id != expected) check_fail("row %zu draws token %d, not %d", t, id, expected);
        }
    }
}

static void check_widen(const Config *c, size_t n) {
    check_begin("%zu x %zu", n, c->hidden_size);
    const Dim count = some_of(n * c->hidden_size, 4000), one = all_of(1);
    Tensor *in = tensor_in("in", one, count), *out = tensor_make(TENSOR_WRITTEN, "out", DTYPE_FP32, one, count);
    CHECK(widen, of(out), of(in), len(count));
    expect(out, 0);
}

static void check_gradient_add(const Config *c, size_t n) {
    check_begin("%zu x %zu", n, c->hidden_size);
    const Dim count = some_of(n * c->hidden_size, 4000), one = all_of(1);
    Tensor *in = tensor_make(TENSOR_READ, "in", check.ops->summed, one, count);
    Tensor *gradient = tensor_inout("gradient", one, count);
    CHECK(gradient_add, of(gradient), gradient->type, of(in), len(count));
    expect(gradient, 0);
}

static void check_sum_of_squares(const Config *c, size_t n) {
    check_begin("%zu x %zu", n, c->hidden_size);
    const Dim count = all_of(n * c->hidden_size);
    Tensor *x = tensor_in("x", all_of(1), count);
    double found = 0, sum = 0;
    ON_DEVICE(found = check.ops->sum_of_squares(of(x), x->type, count.size));
    for (size_t i = 0; i < count.size; i++) sum += ((double *)x->twin)[i] * ((double *)x->twin)[i];
    if (!(fabs(found - sum) <= 2e-6 * sum)) check_fail("is %.9g, expected %.9g", found, sum);
}

// From moments of 0: weights by the formula, scales as the largest magnitudes of blocks.
static void check_adamw_in_8_bits(const Config *c, size_t n) {
    AdamW step = {1e-2, 0.9, 0.95, 1e-8, 0.1, 0.5, 7, 42, 0, 100, NULL, NULL};
    const int has_master = check.ops->stored == DTYPE_BF16;
    check_begin("%zu, moments in 8 bits", min_size(n * c->hidden_size, 4000));
    const Dim count = all_of(min_size(n * c->hidden_size, 4000)), one = all_of(1);
    const Dim blocks = all_of(moment_blocks(DTYPE_INT8, &step, count.size));
    const void *zeros = check_allocate(blocks.size * sizeof(float));
    Tensor *w = tensor_inout("w", one, count), *gradient = tensor_in("gradient", one, count);
    Tensor *master = has_master ? tensor_make(TENSOR_CHANGED, "master", DTYPE_FP32, one, count) : NULL;
    Tensor *m = tensor_make(TENSOR_SCRATCH, "m", DTYPE_INT8, one, count);
    Tensor *v = tensor_make(TENSOR_SCRATCH, "v", DTYPE_INT8, one, count);
    Tensor *m_scales = tensor_given(TENSOR_CHANGED, "scales of m", DTYPE_FP32, one, blocks, zeros);
    Tensor *v_scales = tensor_given(TENSOR_CHANGED, "scales of v", DTYPE_FP32, one, blocks, zeros);
    step.m_scales = of(m_scales), step.v_scales = of(v_scales);
    ON_DEVICE(
        check.ops->adamw(of(w), of(master), of(gradient), gradient->type, of(m), of(v), DTYPE_INT8, count.size, &step));
    double *wt = (double *)w->twin, *gt = (double *)gradient->twin, *kt = master ? (double *)master->twin : wt;
    for (size_t i = 0; i < count.size; i++) {
        double *scale_m = (double *)m_scales->twin + (step.block_first + i) / MOMENT_BLOCK, new_m = 0, new_v = 0;
        double *scale_v = (double *)v_scales->twin + (step.block_first + i) / MOMENT_BLOCK;
        wt[i] = kt[i] += reference_adamw(kt[i], &new_m, &new_v, gt[i], &step);
        *scale_m = fmax(*scale_m, fabs(new_m)), *scale_v = fmax(*scale_v, new_v);
    }
    expect(w, 0);
    expect(master, 0);
    expect(m_scales, 0);
    expect(v_scales, 0);
}

static void check_adamw(const Config *c, size_t n) {
    const AdamW step = {1e-2, 0.9, 0.95, 1e-8, 0.1, 0.5, 7, 42, 0, 0, NULL, NULL};
    const int master = check.ops->stored == DTYPE_BF16;
    const DType moments = check.ops->stored == DTYPE_FP64 ? DTYPE_FP64 : DTYPE_FP32;
    check_begin("%zu", min_size(n * c->hidden_size, 100003));
    const Dim count = some_of(min_size(n * c->hidden_size, 100003), 4000), one = all_of(1);
    float *squares = (float *)check_allocate(count.size * sizeof(float));
    void *above = check_allocate(count.size * sizeof(double));
    for (size_t i = 0; i < count.size; i++) squares[i] = 0.1f + (float)random_uniform(6, 0, i);
    elements_from_float(above, moments, squares, count.size);
    Tensor *w = tensor_inout("w", one, count), *gradient = tensor_in("gradient", one, count);
    Tensor *kept = master ? tensor_make(TENSOR_CHANGED, "master", DTYPE_FP32, one, count) : NULL;
    Tensor *m = tensor_make(TENSOR_CHANGED, "m", moments, one, count);
    Tensor *v = tensor_given(TENSOR_CHANGED, "v", moments, one, count, above);
    ON_DEVICE(
        check.ops->adamw(of(w), of(kept), of(gradient), gradient->type, of(m), of(v), moments, count.size, &step));
    double *wt = (double *)w->twin, *mt = (double *)m->twin, *vt = (double *)v->twin, *gt = (double *)gradient->twin;
    double *kt = kept ? (double *)kept->twin : wt;
    for (size_t i = 0; i < count.count; i++) wt[i] = kt[i] += reference_adamw(kt[i], &mt[i], &vt[i], gt[i], &step);
    expect(w, 0);
    expect(kept, 0);
    expect(m, 0);
    expect(v, 0);
    check_adamw_in_8_bits(c, n);
}

// ---- the list ------------------------------------------------------------------------------------------------------
static const struct {
    const char *name;
    void (*run)(const Config *c, size_t n);
} op_checks[] = {
#define OP(type, op, ...) {#op, check_##op},
#define OP_HOST(...)
#define OP_SCRATCH(...)
#define OP_MEMORY(...)
#include "llmc/ops/op_list.h"
};
#define OP_CHECKS (sizeof(op_checks) / sizeof(op_checks[0]))
#undef CHECK

#endif
