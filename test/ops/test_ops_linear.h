/*
The ops of linear attention and of the gate of attention's output: against their references, at shapes, spans and slots
of every kind. Without a reference: a call cut into several, a state's transfer, documents that do not meet. Names have
no "linear" in them: rows of other matrix products (rows.txt) leave them out. Part of test_ops.c.
*/
#ifndef TEST_OPS_LINEAR_H
#define TEST_OPS_LINEAR_H
#include "llmc/ops/ops_reference_linear.h"
#include "cases_linear.h"
#include "test_ops_reference.h"

// ---- the references against central differences ---------------------------------------------------------------------
// 7 tokens: 3 end a document that has 2 earlier tokens; then a document of one token, and one of three.
static DeltaShape shape_of_seven(void) {
    static const Span span[] = {{0, 2, 5, 0}, {5, 5, 6, 3}, {8, 8, 11, 4}};
    const DeltaShape shape = {.spans = {span, 3, 0, 0.0},
                              .HK = 2,
                              .HV = 4,
                              .K = 3,
                              .V = 2,
                              .taps = 4,
                              .stride = 23,
                              .doubled = 1,
                              .most = INFINITY};
    return shape;
}
enum { SEVEN_W = 2 * 2 * 3 + 4 * 2, SEVEN_STATE = 4 * 3 * 2, SEVEN_STRIDE = 23 };

static void gate_problem(double *out, double *const *x) { reference_gate_forward(out, x[0], x[1], 9, 1); }
static void gate_problem_back(double *const *d, const double *dout, double *const *x) {
    reference_gate_backward(d[0], d[1], dout, x[0], x[1], 9, 1);
}
static void head_gate_problem(double *out, double *const *x) { reference_gate_forward(out, x[0], x[1], 12, 4); }
static void head_gate_problem_back(double *const *d, const double *dout, double *const *x) {
    reference_gate_backward(d[0], d[1], dout, x[0], x[1], 12, 4);
}

// k, then v: two tokens of three heads of 5 elements; heads share 2 of them, values have 4
static void latent_problem(double *out, double *const *x) {
    reference_latent_expand(out, out + 30, x[0], x[1], 2, 3, 5, 4, 2);
}
static void latent_problem_back(double *const *d, const double *dout, double *const *x) {
    (void)x;
    reference_latent_fold(d[0], d[1], dout, dout + 30, 2, 3, 5, 4, 2);
}

static void gated_norm_problem(double *out, double *const *x) {
    reference_gated_norm_forward(out, x[0], x[1], x[2], 2, 3, 4, 13, 0, 1e-2);
}
static void gated_norm_problem_back(double *const *d, const double *dout, double *const *x) {
    reference_gated_norm_backward(d[0], d[1], d[2], dout, x[0], x[1], x[2], 2, 3, 4, 13, 0, 1e-2, NULL);
}

static void gate_first_problem(double *out, double *const *x) {
    reference_gated_norm_forward(out, x[0], x[1], x[2], 2, 3, 4, 13, 1, 1e-2);
}
static void gate_first_problem_back(double *const *d, const double *dout, double *const *x) {
    reference_gated_norm_backward(d[0], d[1], d[2], dout, x[0], x[1], x[2], 2, 3, 4, 13, 1, 1e-2, NULL);
}

// out, then the columns after the call
static void conv_problem(double *out, double *const *x) {
    const DeltaShape shape = shape_of_seven();
    memcpy(out + 7 * SEVEN_W, x[2], 3 * SEVEN_W * sizeof(double));
    reference_conv_forward(out, out + 7 * SEVEN_W, x[0], x[1], x[3], &shape);
}
static void conv_problem_back(double *const *d, const double *dout, double *const *x) {
    const DeltaShape shape = shape_of_seven();
    memcpy(d[2], dout + 7 * SEVEN_W, 3 * SEVEN_W * sizeof(double));
    reference_conv_backward(d[0], d[1], d[3], d[2], dout, x[0], x[2], x[1], x[3], &shape, NULL);
}

// A short convolution of 5 channels with gates
static DeltaShape shape_of_gates(void) {
    DeltaShape shape = shape_of_seven();
    shape.HK = 0, shape.HV = 5, shape.V = 1, shape.gates = 1, shape.taps = 3;
    return shape;
}
static void gates_problem(double *out, double *const *x) {
    const DeltaShape shape = shape_of_gates();
    memcpy(out + 7 * 5, x[2], 2 * 5 * sizeof(double));
    reference_conv_forward(out, out + 7 * 5, x[0], x[1], NULL, &shape);
}
static void gates_problem_back(double *const *d, const double *dout, double *const *x) {
    const DeltaShape shape = shape_of_gates();
    memcpy(d[2], dout + 7 * 5, 2 * 5 * sizeof(double));
    reference_conv_backward(d[0], d[1], NULL, d[2], dout, x[0], x[2], x[1], NULL, &shape, NULL);
}

// out, then the state after the call
static void delta_problem(double *out, double *const *x, const DeltaShape *shape) {
    memcpy(out + 7 * 8, x[5], SEVEN_STATE * sizeof(double));
    reference_delta_forward(out, out + 7 * 8, NULL, x[0], x[1], x[2], x[3], x[4], shape, NULL);
}
static void delta_problem_back(double *const *d, const double *dout, double *const *x, const DeltaShape *shape) {
    memcpy(d[5], dout + 7 * 8, SEVEN_STATE * sizeof(double));
    reference_delta_backward(d[0], d[1], d[2], d[3], d[4], d[5], dout, x[0], x[1], x[2], x[3], x[4], x[5], shape, NULL);
}
static DeltaShape shape_of_one_document(void) { // continued: its state and its gradient pass through
    static const Span span = {0, 2, 9, 0};
    DeltaShape shape = shape_of_seven();
    shape.spans.span = &span, shape.spans.count = 1;
    return shape;
}
static void delta_documents(double *out, double *const *x) {
    const DeltaShape shape = shape_of_seven();
    delta_problem(out, x, &shape);
}
static void delta_documents_back(double *const *d, const double *dout, double *const *x) {
    const DeltaShape shape = shape_of_seven();
    delta_problem_back(d, dout, x, &shape);
}
static void delta_goes_on(double *out, double *const *x) {
    const DeltaShape shape = shape_of_one_document();
    delta_problem(out, x, &shape);
}
static void delta_goes_on_back(double *const *d, const double *dout, double *const *x) {
    const DeltaShape shape = shape_of_one_document();
    delta_problem_back(d, dout, x, &shape);
}

// Mamba-2's rule: least and most are bounds that some steps reach
static void ssd_problem(double *out, double *const *x, DeltaShape shape) {
    shape.ssd = 1, shape.least = 0.3, shape.most = 1.5;
    memcpy(out + 7 * 8, x[5], SEVEN_STATE * sizeof(double));
    reference_ssd_forward(out, out + 7 * 8, NULL, x[0], x[1], x[2], x[3], x[4], &shape, NULL);
}
static void ssd_problem_back(double *const *d, const double *dout, double *const *x, DeltaShape shape) {
    shape.ssd = 1, shape.least = 0.3, shape.most = 1.5;
    memcpy(d[5], dout + 7 * 8, SEVEN_STATE * sizeof(double));
    reference_ssd_backward(d[0], d[1], d[2], d[3], d[4], d[5], dout, x[0], x[1], x[2], x[3], x[4], x[5], &shape, NULL);
}
static void ssd_documents(double *out, double *const *x) { ssd_problem(out, x, shape_of_seven()); }
static void ssd_documents_back(double *const *d, const double *dout, double *const *x) {
    ssd_problem_back(d, dout, x, shape_of_seven());
}
static void ssd_goes_on(double *out, double *const *x) { ssd_problem(out, x, shape_of_one_document()); }
static void ssd_goes_on_back(double *const *d, const double *dout, double *const *x) {
    ssd_problem_back(d, dout, x, shape_of_one_document());
}

static const Problem linear_problems[] = {
    {"gate", {9, 9}, 9, gate_problem, gate_problem_back},
    {"gate of a head", {12, 3}, 12, head_gate_problem, head_gate_problem_back},
    {"latents", {42, 4}, 60, latent_problem, latent_problem_back},
    {"gated norm", {24, 26, 4}, 24, gated_norm_problem, gated_norm_problem_back},
    {"norm after the gate", {24, 26, 12}, 24, gate_first_problem, gate_first_problem_back},
    {"convolution",
     {7 * SEVEN_STRIDE, 4 * SEVEN_W, 3 * SEVEN_W, SEVEN_W},
     7 * SEVEN_W + 3 * SEVEN_W,
     conv_problem,
     conv_problem_back},
    {"short convolution", {7 * SEVEN_STRIDE, 3 * 5, 2 * 5}, 7 * 5 + 2 * 5, gates_problem, gates_problem_back},
    {"delta rule of documents",
     {7 * SEVEN_W, 7 * SEVEN_STRIDE, 7 * SEVEN_STRIDE, 4, 4, SEVEN_STATE},
     7 * 8 + SEVEN_STATE,
     delta_documents,
     delta_documents_back},
    {"delta rule that goes on",
     {7 * SEVEN_W, 7 * SEVEN_STRIDE, 7 * SEVEN_STRIDE, 4, 4, SEVEN_STATE},
     7 * 8 + SEVEN_STATE,
     delta_goes_on,
     delta_goes_on_back},
    {"Mamba-2 of documents",
     {7 * SEVEN_W, 7 * SEVEN_STRIDE, 4, 4, 4, SEVEN_STATE},
     7 * 8 + SEVEN_STATE,
     ssd_documents,
     ssd_documents_back},
    {"Mamba-2 that goes on",
     {7 * SEVEN_W, 7 * SEVEN_STRIDE, 4, 4, 4, SEVEN_STATE},
     7 * 8 + SEVEN_STATE,
     ssd_goes_on,
     ssd_goes_on_back},
};

TEST(reference_gradients_of_delta) {
    for (size_t p = 0; p < COUNT_OF(linear_problems); p++) expect_gradients(&linear_problems[p]);
}

// ---- gates and the gated norm ---------------------------------------------------------------------------------------
TEST(split_heads) {
    static const size_t shapes[][3] = {{1, 1, 1}, {1, 3, 2}, {3, 2, 5}, {7, 4, 16}, {5, 3, 64}, {33, 2, 257}};
    for (size_t i = 0; i < 2 * COUNT_OF(shapes); i++) {
        const size_t *shape = shapes[i / 2];
        const OpShape s = {.n = shape[0], .NH = shape[1], .HD = shape[2], .back = (int)i % 2};
        case_of("", "split");
        varied.exactly = 1;
        case_split_heads(&s);
    }
}

// Shared parts of keys of no, some and all elements; rows that packs of 16 bytes fit or do not; values as wide as keys
// or narrower
TEST(latents) {
    static const size_t shapes[][5] = {{1, 1, 2, 1, 1},     {3, 3, 10, 4, 5}, {7, 2, 16, 8, 16},  {5, 20, 64, 16, 64},
                                       {5, 20, 64, 16, 32}, {9, 1, 8, 8, 8},  {33, 3, 36, 12, 35}};
    for (size_t i = 0; i < COUNT_OF(shapes); i++) {
        const size_t *shape = shapes[i];
        OpShape s = {.n = shape[0], .NH = shape[1], .HD = shape[2], .VD = shape[4], .R = shape[3], .C = shape[2]};
        case_of("", "latents");
        varied.exactly = 1;
        case_latent_expand(&s);
        for (s.back = 0; s.back < 2; s.back++) case_latent_trim(&s);
        varied.exactly = 0;
        case_latent_fold(&s);
        case_sums_add(&s);
    }
}

// gates NULL: random
static void gate_case(const double *gates, size_t count, int same) {
    const OpShape s = {.n = 1, .NH = 1, .HD = count};
    case_of(same ? ", out is x, dx is dout, dgate is gate" : "", "gate of %g", gates ? gates[0] : NAN);
    drawn("gate", 0.0, 3.0);
    if (gates) given("gate", gates);
    case_gate_forward(&s);
    case_gate_backward(&s);
}

TEST(gate) {
    static const size_t counts[] = {1, 2, 7, 8, 15, 16, 17, 33, 1000, 4099, 20011};
    static const double extremes[] = {0.0, -0.0, 1e-30, 5.0, -5.0, 20.0, -20.0, 100.0, -100.0, 3000.0, -3000.0};
    for (size_t i = 0; i < 2 * COUNT_OF(counts); i++) gate_case(NULL, counts[i / 2], (int)i % 2);
    for (size_t i = 0; i < COUNT_OF(extremes); i++) gate_case(&extremes[i], 1, (int)i % 2);
}

TEST(gate_of_heads) { // tokens, heads, elements of a head
    static const size_t shapes[][3] = {{1, 1, 2},  {3, 2, 7},     {5, 3, 8},  {7, 4, 16},
                                       {2, 5, 33}, {33, 16, 128}, {3, 1, 257}};
    for (size_t i = 0; i < 2 * COUNT_OF(shapes); i++) {
        const size_t *shape = shapes[i / 2];
        const OpShape s = {.n = shape[0], .NH = shape[1], .HD = shape[2], .joined = 1};
        case_of(i % 2 ? ", out is x, dx is dout, dgate is gate" : "", "gates of heads");
        drawn("gate", 0.0, 3.0);
        case_gate_forward(&s);
        case_gate_backward(&s);
    }
}

TEST(gated_norm) { // a third of the shapes with the gate first
    static const size_t shapes[][3] = {{1, 1, 1},  {3, 2, 2},   {1, 4, 7},   {5, 3, 16},   {2, 6, 33},   {9, 2, 64},
                                       {4, 3, 96}, {3, 5, 128}, {65, 1, 17}, {33, 16, 32}, {2, 2, 1025}, {3, 1, 8192}};
    static const char *const variants[] = {"", ", out is x, dx is dout", ", no dz, no dw"};
    for (size_t i = 0; i < COUNT_OF(shapes); i++)
        for (size_t variant = 0; variant < COUNT_OF(variants); variant++) {
            const size_t HV = shapes[i][1], V = shapes[i][2], stride = HV * V + ((i + variant) % 3 && V < 2048 ? i : 0);
            const OpShape s = {.n = shapes[i][0],
                               .norm = {1e-5, 0.0, NORM_RMS},
                               .delta = {.HV = HV, .V = V, .stride = stride},
                               .back = (i / 3 + variant) % 3 == 0 || V > 100};
            if (EMULATED && (i + variant) % 3) continue;
            case_of(variants[variant], "gated norm, stride=%zu%s", stride, s.back ? ", gate first" : "");
            drawn("z", 0.0, 2.0);
            case_gated_norm_forward(&s);
            case_gated_norm_backward(&s);
        }
}

// ---- shapes and spans -----------------------------------------------------------------------------------------------
// Lengths of documents, ended by 0, and earlier tokens of the first one. The first cases are shorter than the
// convolution's taps; the last begin on both sides of a block of the chunked form.
static const struct {
    size_t before, lengths[6];
} spans_cases[] = {{0, {1}},        {1, {1}},      {7, {1}},    {0, {2, 1, 1, 3}}, {2, {1, 2, 5}},
                   {0, {64}},       {3, {63}},     {100, {65}}, {0, {20, 50}},     {1, {64, 1, 30}},
                   {5, {3, 63, 1}}, {0, {70, 70}}, {64, {129}}, {0, {130}},        {9, {33, 1, 1, 64, 2}},
                   {0, {191}}};

static DeltaShape shape_of_case(Span *span, size_t spans, size_t HK, size_t HV, size_t K, size_t V, size_t taps) {
    DeltaShape shape = {.HK = HK, .HV = HV, .K = K, .V = V, .taps = taps, .doubled = spans % 2, .most = INFINITY};
    shape.spans = documents_of(span, spans_cases[spans].lengths, spans_cases[spans].before);
    shape.stride = delta_channels(&shape) + (spans % 3 ? HV * V + 2 * HV : spans % 2);
    return shape;
}

// Returns the shape of a short convolution with as many channels, rows of 3 W elements or more.
static DeltaShape with_gates(DeltaShape shape, size_t i) {
    shape.gates = 1, shape.stride = conv_width(&shape) + 8 * (i % 2);
    return shape;
}

// HK, HV, K, V, spans
static const size_t delta_shapes[][5] = {
    {1, 1, 1, 1, 0},   {1, 1, 1, 1, 7},   {1, 2, 2, 3, 3},     {2, 2, 3, 2, 5},     {3, 3, 8, 16, 9},
    {1, 3, 16, 8, 12}, {2, 6, 17, 5, 10}, {1, 2, 32, 32, 13},  {2, 4, 5, 33, 14},   {1, 1, 64, 64, 11},
    {1, 2, 65, 40, 9}, {3, 6, 4, 4, 15},  {1, 1, 128, 128, 6}, {1, 2, 130, 127, 4}, {2, 2, 128, 16, 2},
    {2, 2, 16, 16, 1}, {1, 4, 12, 70, 8}, {1, 1, 33, 65, 12}};

// Emulated, a shape costs by its blocks: keeps those with few, one token and both sides of 32, 64 and 128 in K.
static int delta_shape_is_left_out(size_t s) {
    static const size_t kept[] = {0, 1, 6, 10, 12, 17};
    for (size_t i = 0; i < COUNT_OF(kept); i++)
        if (s == kept[i]) return 0;
    return EMULATED && !all_cases();
}

TEST(conv) {
    static const size_t taps[] = {4, 2, 1, 8, 3, 4};
    Span span[MOST_SPANS];
    for (size_t s = 0; s < 2 * COUNT_OF(spans_cases); s++) {
        const size_t HV = 1 + s % 3, HK = HV == 2 ? 1 : HV, sizes[] = {1, 5, 16, 33, 3};
        const size_t K = sizes[s % 5], V = sizes[(s + 3) % 5];
        const DeltaShape shape = shape_of_case(span, s % COUNT_OF(spans_cases), HK, HV, K, V, taps[(s + s / 16) % 6]);
        if (EMULATED && !all_cases() && s % 2) continue;
        conv_forward_case(&shape, s % 2);
        conv_backward_case(&shape, s % 4 != 3, s % 2);
    }
    for (size_t s = 0; s < 8; s++) { // shorter than the taps, in a longer document
        const DeltaShape shape = shape_of_case(span, 1 + s / 2, 1, 2, 3, 5, s % 2 ? 8 : 4);
        conv_backward_case(&shape, 1, s % 2);
    }
    const DeltaShape wide = shape_of_case(span, 14, 2, 4, 128, 128, 4);
    conv_forward_case(&wide, 1);
    conv_backward_case(&wide, 1, 1);
}

// Generation: documents begin in slots of 100 tokens; one token each, a prompt in slot 2, prompts and single tokens.
static const Span single[] = {{300, 305, 306, 0}, {0, 99, 100, 1}, {502, 510, 511, 2}, {100, 100, 101, 3}},
                  prompt = {200, 200, 237, 0}, rest = {200, 237, 303, 0},
                  both[] = {{400, 402, 403, 0}, {100, 100, 170, 1}, {0, 1, 2, 71}, {200, 250, 253, 72}};
static const Spans in_slots[] = {{single, 4, 0, 0.0}, {&prompt, 1, 0, 0.0}, {&rest, 1, 0, 0.0}, {both, 4, 0, 0.0}};

TEST(conv_with_gates) {
    static const size_t taps[] = {3, 7, 4, 1, 8, 3}, widths[] = {1, 5, 16, 40, 24};
    Span span[MOST_SPANS];
    for (size_t s = 0; s < COUNT_OF(spans_cases); s++) {
        const DeltaShape shape = with_gates(shape_of_case(span, s, 0, widths[s % 5], 0, 1, taps[s % 6]), s);
        if (EMULATED && !all_cases() && s % 2) continue;
        conv_forward_case(&shape, 0);
        conv_backward_case(&shape, s % 4 != 3, 0);
    }
    for (size_t s = 0; s < 4; s++) { // shorter than the taps, in a longer document
        const DeltaShape shape = with_gates(shape_of_case(span, 1 + s, 0, 16, 0, 1, s % 2 ? 7 : 3), s);
        conv_backward_case(&shape, 1, 0);
    }
    for (size_t s = 0; s < 2 * COUNT_OF(in_slots); s++) {
        const DeltaShape shape = {.spans = in_slots[s / 2],
                                  .HV = s % 2 ? 24 : 5,
                                  .V = 1,
                                  .taps = s % 2 ? 7 : 3,
                                  .slot_tokens = 100,
                                  .gates = 1};
        const DeltaShape gated = with_gates(shape, s);
        conv_forward_case(&gated, 0);
    }
    const DeltaShape wide = with_gates(shape_of_case(span, 14, 0, 1032, 0, 1, 3), 0);
    conv_forward_case(&wide, 0);
    conv_backward_case(&wide, 1, 0);
}

// Rounding errors of a state, and of what is solved with it, accumulate.
static double delta_slack(const DeltaShape *shape) { return shape->K < 3 ? 12.0 : 4.0; }

TEST(delta_forward) {
    Span span[MOST_SPANS];
    for (size_t s = 0; s < COUNT_OF(delta_shapes); s++) {
        const size_t *of_case = delta_shapes[s];
        const DeltaShape shape = shape_of_case(span, of_case[4], of_case[0], of_case[1], of_case[2], of_case[3], 4);
        if (delta_shape_is_left_out(s)) continue;
        delta_forward_case(&shape, GATES_USUAL, s % 3 == 1 ? DELTA_OUT | DELTA_WITH_TRANSFER : DELTA_OUT,
                           delta_slack(&shape));
        delta_forward_case(&shape, GATES_USUAL, s % 3 == 2 ? DELTA_WITH_TRANSFER : 0, delta_slack(&shape));
    }
}

TEST(delta_backward) {
    Span span[MOST_SPANS];
    for (size_t s = 0; s < COUNT_OF(delta_shapes); s++) {
        const size_t *of_case = delta_shapes[s];
        const DeltaShape shape = shape_of_case(span, of_case[4], of_case[0], of_case[1], of_case[2], of_case[3], 4);
        if (delta_shape_is_left_out(s)) continue;
        delta_backward_case(&shape, GATES_USUAL, s % 5 == 4 ? DELTA_NO_HEADS : DELTA_ALL, delta_slack(&shape));
        delta_backward_case(&shape, GATES_USUAL, DELTA_DSTATE, delta_slack(&shape));
    }
}

// exp(-500) is 0, and no exp(500) of another token may occur. No decay, beta 1 and equal keys make the largest powers
// in a block's solution.
TEST(delta_of_extreme_gates) {
    static const size_t spans[] = {11, 12, 14};
    Span span[MOST_SPANS];
    for (size_t i = 0; i < COUNT_OF(spans); i++)
        for (int gates = GATES_LASTING; gates < GATES; gates++) {
            const DeltaShape shape = shape_of_case(span, spans[i], 1, 2, i ? 16 : 5, i ? 8 : 33, 4);
            if (EMULATED && !all_cases() && (size_t)gates % COUNT_OF(spans) != i) continue;
            delta_forward_case(&shape, (GatesKind)gates, DELTA_OUT | DELTA_WITH_TRANSFER, 4.0);
            delta_backward_case(&shape, (GatesKind)gates, DELTA_ALL, 4.0);
        }
}

TEST(delta_of_slots) {
    static const size_t heads[][4] = {{1, 2, 16, 8}, {2, 2, 3, 17}, {1, 1, 64, 33}};
    for (size_t s = 0; s < COUNT_OF(in_slots) * COUNT_OF(heads); s++) {
        const size_t *h = heads[s / COUNT_OF(in_slots)];
        DeltaShape shape = {.spans = in_slots[s % COUNT_OF(in_slots)],
                            .HK = h[0],
                            .HV = h[1],
                            .K = h[2],
                            .V = h[3],
                            .taps = s % 2 ? 4 : 2,
                            .slot_tokens = 100,
                            .doubled = s % 3 == 0,
                            .most = INFINITY};
        shape.stride = delta_channels(&shape) + s;
        conv_forward_case(&shape, s % 2);
        delta_forward_case(&shape, GATES_USUAL, s % 5 ? DELTA_OUT : 0, delta_slack(&shape));
        shape.ssd = 1;
        ssd_forward_case(&shape, GATES_USUAL, s % 5 ? DELTA_OUT : 0, 4.0);
    }
}

// ---- Mamba-2's rule -------------------------------------------------------------------------------------------------
static DeltaShape ssd_shape_of_case(Span *span, size_t spans, size_t HK, size_t HV, size_t K, size_t V) {
    DeltaShape shape = shape_of_case(span, spans, HK, HV, K, V, 4);
    shape.ssd = 1, shape.least = spans % 2 ? 0.001 : 0.0, shape.most = spans % 3 ? INFINITY : 0.5;
    return shape;
}

TEST(ssd) {
    Span span[MOST_SPANS];
    for (size_t s = 0; s < COUNT_OF(delta_shapes); s++) {
        const size_t *of_case = delta_shapes[s];
        const DeltaShape shape = ssd_shape_of_case(span, of_case[4], of_case[0], of_case[1], of_case[2], of_case[3]);
        if (delta_shape_is_left_out(s)) continue;
        ssd_forward_case(&shape, GATES_USUAL, s % 3 == 1 ? DELTA_OUT | DELTA_WITH_TRANSFER : DELTA_OUT, 4.0);
        ssd_forward_case(&shape, GATES_USUAL, s % 3 == 2 ? DELTA_WITH_TRANSFER : 0, 4.0);
        ssd_backward_case(&shape, GATES_USUAL, s % 5 == 4 ? DELTA_NO_HEADS : DELTA_ALL, 4.0);
        // a state of one or two elements has few roundings to average out, in bf16 of split operands (2^-17 each)
        ssd_backward_case(&shape, GATES_USUAL, DELTA_DSTATE, delta_slack(&shape));
    }
}

// More columns of q and k than a launch of op set cuda's gradients takes
TEST(ssd_of_long_states) {
    Span span[MOST_SPANS];
    const DeltaShape shape = ssd_shape_of_case(span, 13, 1, 2, 256, 16);
    ssd_forward_case(&shape, GATES_USUAL, DELTA_OUT, 4.0);
    ssd_backward_case(&shape, GATES_USUAL, DELTA_ALL, 4.0);
}

// Steps at both bounds, decays of exp(-500), and a state that adds up equal keys. Steps of 500 enlarge what cancels.
TEST(ssd_of_extreme_steps) {
    static const size_t spans[] = {11, 12, 14};
    Span span[MOST_SPANS];
    for (size_t i = 0; i < COUNT_OF(spans); i++)
        for (int gates = GATES_LASTING; gates < GATES; gates++) {
            const DeltaShape shape = ssd_shape_of_case(span, spans[i], 1, 2, i ? 16 : 5, i ? 8 : 33);
            if (EMULATED && !all_cases() && (size_t)gates % COUNT_OF(spans) != i) continue;
            ssd_forward_case(&shape, (GatesKind)gates, DELTA_OUT | DELTA_WITH_TRANSFER, 8.0);
            ssd_backward_case(&shape, (GatesKind)gates, DELTA_ALL, 8.0);
        }
}

// ---- a call in parts ------------------------------------------------------------------------------------------------
// Returns rows [begin, end) of a call as a call of its own.
static DeltaShape part_of(const DeltaShape *whole, size_t begin, size_t end, Span *span) {
    DeltaShape part = *whole;
    part.spans.span = span, part.spans.count = 0;
    for (size_t s = 0; s < whole->spans.count; s++) {
        Span of = whole->spans.span[s];
        const size_t last = of.row + span_length(&of), from = of.row > begin ? of.row : begin;
        const size_t to = last < end ? last : end, first = of.begin;
        if (from >= to) continue;
        of.begin = first + from - of.row, of.end = first + to - of.row, of.row = from - begin;
        span[part.spans.count++] = of;
    }
    return part;
}

static void *from(const Guarded *t, size_t element) { return (char *)t->data + element * dtype_size(t->type); }

static void copy_tensor(const Guarded *to, size_t element, const Guarded *t, size_t count) {
    ops->copy(from(to, element), t->data, count * dtype_size(t->type));
}

// Tensors passed from call to call, and the calls' results
typedef struct {
    Guarded *conv, *columns, *kept_columns, *dconv, *dweight, *dcolumns;
    Guarded *out, *state, *kept_state, *dx, *db, *da, *dA_log, *ddt_bias, *dstate;
} Parts;
enum { MOST_CALLS = 8 };

static Parts parts_of(const DeltaShape *shape, const double *const *before) {
    const size_t n = delta_rows(shape), W = delta_channels(shape), HV = shape->HV, each = delta_state_elements(shape);
    const size_t columns = (shape->taps - 1) * W;
    Parts p = {0};
    p.conv = output("conv", n * W), p.dconv = rows_of(CHANGED, "dconv", n, conv_width(shape), shape->stride, 0.0);
    p.columns = guarded_values(CHANGED, "columns", ops->stored, before[0], columns);
    p.dcolumns = guarded_values(CHANGED, "dcolumns", ops->summed, before[1], columns);
    p.state = guarded_values(CHANGED, "state", ops->summed, before[2], each);
    p.dstate = guarded_values(CHANGED, "dstate", ops->summed, before[3], each);
    p.kept_columns = guarded_poison(SCRATCH, "kept columns", ops->stored, MOST_CALLS * columns);
    p.kept_state = guarded_poison(SCRATCH, "kept states", ops->summed, MOST_CALLS * each);
    p.out = output("out", n * HV * shape->V), p.dx = output("dx", n * W);
    p.db = rows_of(CHANGED, "db", n, HV, shape->stride, 0.0), p.da = rows_of(CHANGED, "da", n, HV, shape->stride, 0.0);
    p.dweight = normal(CHANGED, "dweight", ops->summed, W * shape->taps, 0.0, 0.0);
    p.dA_log = normal(CHANGED, "dA_log", ops->summed, HV, 0.0, 0.0);
    p.ddt_bias = normal(CHANGED, "ddt_bias", ops->summed, HV, 0.0, 0.0);
    return p;
}

// Runs forward in `count` calls that end at rows `cut`, and backward in the same calls, the last first.
static void run_parts(const Parts *p, const DeltaInputs *in, const Guarded *x, const Guarded *weight,
                      const Guarded *dout, const Guarded *scratch, const DeltaShape *whole, const size_t *cut,
                      size_t count) {
    const size_t W = delta_channels(whole), HV = whole->HV, V = whole->V, stride = whole->stride;
    const size_t columns = (whole->taps - 1) * W, each = delta_state_elements(whole);
    Span span[MOST_SPANS];
    for (size_t i = 0, row = 0; i < count; row = cut[i++]) {
        const DeltaShape part = part_of(whole, row, cut[i], span);
        copy_tensor(p->kept_columns, i * columns, p->columns, columns);
        copy_tensor(p->kept_state, i * each, p->state, each);
        ops->conv_forward(from(p->conv, row * W), p->columns->data, from(x, row * stride), weight->data, NULL, &part);
        ops->delta_forward(from(p->out, row * HV * V), p->state->data, NULL, from(in->x, row * W),
                           from(in->b, row * stride), from(in->a, row * stride), in->A_log->data, in->dt_bias->data,
                           &part, scratch->data);
    }
    for (size_t i = count; i-- > 0;) {
        const size_t row = i ? cut[i - 1] : 0;
        const DeltaShape part = part_of(whole, row, cut[i], span);
        ops->conv_backward(from(p->dconv, row * stride), p->dweight->data, NULL, p->dcolumns->data,
                           from(in->x, row * W), from(x, row * stride), from(p->kept_columns, i * columns),
                           weight->data, NULL, &part, scratch->data);
        ops->delta_backward(from(p->dx, row * W), from(p->db, row * stride), from(p->da, row * stride), p->dA_log->data,
                            p->ddt_bias->data, p->dstate->data, from(dout, row * HV * V), from(in->x, row * W),
                            from(in->b, row * stride), from(in->a, row * stride), in->A_log->data, in->dt_bias->data,
                            from(p->kept_state, i * each), &part, scratch->data);
    }
}

// Compares two ways' results.
static void expect_alike(const Guarded *found, const Guarded *wanted, double scale) {
    double *values = case_doubles(wanted->count);
    for (size_t i = 0; i < wanted->count; i++) values[i] = result(wanted, i);
    expect_within(found, values, ops->summed == DTYPE_FP64 ? 100.0 : 8.0, scale);
}

static size_t scratch_for(const DeltaShape *shape) {
    const size_t forward = ops->delta_forward_scratch(shape), backward = ops->delta_backward_scratch(shape);
    const size_t conv = ops->conv_backward_scratch(shape, 0), most = forward > backward ? forward : backward;
    return most > conv ? most : conv;
}

TEST(delta_in_parts) { // one call, and several that pass on states, columns and their gradients
    static const size_t cuts[][MOST_CALLS] = {{1, 2, 3, 4}, {64, 128}, {100}, {7, 71, 72, 130, 133}, {63, 65, 100}};
    static const size_t cases[] = {12, 14, 10, 11, 9, 15}; // of spans
    Span span[MOST_SPANS];
    for (size_t s = 0; s < COUNT_OF(cases); s++) {
        const size_t taps = s % 3 == 2 ? 8 : 4, K = s % 2 ? 16 : 5, V = s % 2 ? 8 : 20;
        const DeltaShape whole = shape_of_case(span, cases[s], 1 + s % 2, 2, K, V, taps);
        const DeltaShape shape = s % 3 ? whole : with_gates(whole, s); // gates change only the convolution
        const size_t n = delta_rows(&shape), W = delta_channels(&shape), each = delta_state_elements(&shape);
        size_t cut[MOST_CALLS], count = 0;
        while (count < MOST_CALLS - 1 && cuts[s % 5][count] && cuts[s % 5][count] < n)
            cut[count] = cuts[s % 5][count], count++;
        cut[count++] = n;
        if (EMULATED && !all_cases() && s % 2) continue;
        delta_case("in parts", &shape, "");
        const DeltaInputs in = delta_inputs(&shape, GATES_USUAL);
        Guarded *x = rows_of(INPUT, "x before", n, conv_width(&shape), shape.stride, 1.0);
        Guarded *weight = input("weight", W * taps);
        Guarded *dout = input("dout", n * shape.HV * V), *scratch = scratch_of(scratch_for(&shape));
        const double *before[] = {columns_before(SCRATCH, &shape, 1)->values, dcolumns_behind(&shape)->values,
                                  states_of(SCRATCH, "state", ops->summed, &shape, 1, each)->values, normals(each)};
        const Parts one = parts_of(&shape, before), several = parts_of(&shape, before);
        tensors_load();
        run_parts(&one, &in, x, weight, dout, scratch, &shape, &n, 1);
        run_parts(&several, &in, x, weight, dout, scratch, &shape, cut, count);
        tensors_check(0);
        expect_alike(several.conv, one.conv, 0.0), expect_alike(several.columns, one.columns, 0.0);
        expect_alike(several.dconv, one.dconv, 1.0), expect_alike(several.dweight, one.dweight, 1.0);
        expect_alike(several.dcolumns, one.dcolumns, 1.0), expect_alike(several.out, one.out, 0.0);
        expect_alike(several.state, one.state, 0.0), expect_alike(several.dstate, one.dstate, 1.0);
        expect_alike(several.dx, one.dx, 1.0), expect_alike(several.db, one.db, 1.0);
        expect_alike(several.da, one.da, 1.0), expect_alike(several.dA_log, one.dA_log, 1.0);
        expect_alike(several.ddt_bias, one.ddt_bias, 1.0);
    }
}

// ---- documents do not meet ------------------------------------------------------------------------------------------
// Changes the rows of one span of an input whose rows are `stride` elements apart.
static void change_rows(Guarded *t, const Span *span, size_t width, size_t stride) {
    for (size_t i = span->row * stride; i < (span->row + span_length(span)) * stride; i++)
        if (i % stride < width) element_write(t->before + t->offset, t->type, i, 100.0 * test_normal());
}

static void expect_rows_kept(const Guarded *t, const unsigned char *then, const Span *span, size_t stride) {
    const size_t size = dtype_size(t->type) * stride, rows = t->count / stride;
    for (size_t row = 0; row < rows; row++)
        if ((row < span->row || row >= span->row + span_length(span)) &&
            memcmp(then + t->offset + row * size, t->after + t->offset + row * size, size))
            test_fail("%s: row %zu changed with another document's", t->name, row);
}

TEST(delta_of_other_documents) { // a document's tokens change no bit of others' results, before or after it
    static const size_t cases[] = {9, 14, 10, 3};
    Span span[MOST_SPANS];
    for (size_t s = 0; s < COUNT_OF(cases) * 3; s++) {
        const DeltaShape shape = shape_of_case(span, cases[s / 3], 1, 2, s % 2 ? 16 : 3, 8, 4);
        const size_t n = delta_rows(&shape), W = delta_channels(&shape), HV = shape.HV, V = shape.V;
        const size_t each = delta_state_elements(&shape), changed = s % 3 == 2 ? shape.spans.count - 1 : s % 3;
        const Span *other = &span[changed];
        if (EMULATED && !all_cases() && s % 5) continue;
        delta_case("other documents", &shape, changed ? "" : ", the first");
        const DeltaInputs in = delta_inputs(&shape, GATES_USUAL);
        Guarded *x = rows_of(INPUT, "x before", n, W, shape.stride, 1.0), *weight = input("weight", W * 4);
        Guarded *dout = input("dout", n * HV * V), *scratch = scratch_of(scratch_for(&shape));
        const double *before[] = {columns_before(SCRATCH, &shape, 1)->values, dcolumns_behind(&shape)->values,
                                  states_of(SCRATCH, "state", ops->summed, &shape, 1, each)->values, normals(each)};
        const Parts p = parts_of(&shape, before);
        const struct {
            Guarded *t;
            size_t stride;
        } rows[] = {{p.conv, W}, {p.dconv, shape.stride}, {p.out, HV * V},
                    {p.dx, W},   {p.db, shape.stride},    {p.da, shape.stride}},
          passed[] = {
              {p.columns, 1}, {p.state, 1}, {p.dcolumns, 0}, {p.dstate, 0}}; // 1: of the last span, 0: the first
        unsigned char *then[COUNT_OF(rows) + COUNT_OF(passed)];
        for (int second = 0; second < 2; second++) {
            tensors_load();
            run_parts(&p, &in, x, weight, dout, scratch, &shape, &n, 1);
            tensors_check(0);
            for (size_t i = 0; i < COUNT_OF(then) && !second; i++) {
                const Guarded *t = i < COUNT_OF(rows) ? rows[i].t : passed[i - COUNT_OF(rows)].t;
                then[i] = (unsigned char *)case_memory(t->bytes);
                memcpy(then[i], t->after, t->bytes);
            }
            change_rows(in.x, other, W, W), change_rows(in.b, other, HV, shape.stride);
            change_rows(in.a, other, HV, shape.stride), change_rows(x, other, W, shape.stride);
            change_rows(dout, other, HV * V, HV * V);
        }
        for (size_t i = 0; i < COUNT_OF(rows); i++) expect_rows_kept(rows[i].t, then[i], other, rows[i].stride);
        for (size_t i = 0; i < COUNT_OF(passed); i++) {
            const Guarded *t = passed[i].t;
            const size_t owner = passed[i].stride ? shape.spans.count - 1 : 0;
            if (owner != changed && memcmp(then[COUNT_OF(rows) + i], t->after, t->bytes))
                test_fail("%s changed with another document's tokens", t->name);
        }
    }
}

// ---- transfer of a state --------------------------------------------------------------------------------------------
TEST(transfers_of_ranges) { // matrices, then Mamba-2's numbers
    for (int i = 0; i < 4; i++) {
        const OpShape s = {.delta = {.ssd = i / 2}, .back = i % 2};
        case_of("", "transfer, ssd=%d", s.delta.ssd);
        case_transfer_begin(&s);
        case_state_combine(&s);
    }
}

TEST(delta_transfer) { // state after a call = transfer * the state before + the state after it from 0
    Span span[MOST_SPANS];
    static const size_t cases[][3] = {{12, 16, 8}, {7, 5, 33}, {2, 3, 2}};
    for (size_t s = 0; s < COUNT_OF(cases); s++) {
        const size_t K = cases[s][1], V = cases[s][2];
        const DeltaShape shape = shape_of_case(span, cases[s][0], 1, 2, K, V, 4);
        const size_t each = delta_state_elements(&shape), HV = shape.HV;
        delta_case("transfer", &shape, "");
        const DeltaInputs in = delta_inputs(&shape, GATES_USUAL);
        double *identity = case_doubles(HV * K * K), *expected = case_doubles(each);
        for (size_t i = 0; i < HV * K; i++) identity[i * K + i % K] = 1.0;
        Guarded *state = states_of(CHANGED, "state", ops->summed, &shape, 1, each);
        Guarded *zero = guarded_values(CHANGED, "state from 0", ops->summed, case_doubles(each), each);
        Guarded *transfer = guarded_values(CHANGED, "transfer", ops->summed, identity, HV * K * K);
        Guarded *scratch = scratch_of(scratch_for(&shape));
        tensors_load();
        ops->delta_forward(NULL, state->data, NULL, in.x->data, in.b->data, in.a->data, in.A_log->data,
                           in.dt_bias->data, &shape, scratch->data);
        ops->delta_forward(NULL, zero->data, transfer->data, in.x->data, in.b->data, in.a->data, in.A_log->data,
                           in.dt_bias->data, &shape, scratch->data);
        tensors_check(0);
        for (size_t i = 0; i < each; i++) {
            const size_t row = i / V, head = row / K;
            expected[i] = result(zero, i);
            for (size_t k = 0; k < K; k++)
                expected[i] += result(transfer, row * K + k) * state->values[(head * K + k) * V + i % V];
        }
        expect_within(state, expected, 8.0, 0.0);
    }
}

#endif
