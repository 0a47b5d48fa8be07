/*
Streams of random pairs and groups, and every objective under test, for tests of objectives.
*/
#ifndef TEST_OBJECTIVE_STREAMS_H
#define TEST_OBJECTIVE_STREAMS_H
#include "test/base/testing.h"
#include "llmc/data/objective.h"

static DType type; // of log-probabilities and weights

// ---- streams: log-probabilities are fp32 numbers, hence the same in any build ---------------------------------------
typedef struct {
    Batch batch;
    double *logp, *entropy; // [N]
} Stream;

static Stream stream_allocate(const size_t *length, size_t documents) {
    Stream s;
    Batch *b = &s.batch;
    size_t N = 0;
    memset(&s, 0, sizeof(s));
    b->documents = documents;
    b->document_start = (size_t *)case_memory((documents + 1) * sizeof(size_t));
    for (size_t d = 0; d < documents; d++) N = b->document_start[d + 1] = N + length[d];
    b->N = N;
    b->tokens = (int32_t *)case_memory(N * sizeof(int32_t)), b->targets = (int32_t *)case_memory(N * sizeof(int32_t));
    b->position = (int32_t *)case_memory(N * sizeof(int32_t));
    b->loss_weight = (float *)case_memory(N * sizeof(float)), b->advantage = (float *)case_memory(N * sizeof(float));
    b->reference = (float *)case_memory(N * sizeof(float)), b->old = (float *)case_memory(N * sizeof(float));
    b->group = (size_t *)case_memory(documents * sizeof(size_t)), b->document_weight = case_doubles(documents);
    b->reward = (float *)case_memory(documents * sizeof(float));
    s.logp = case_doubles(N), s.entropy = case_doubles(N);
    batch_set_positions(b);
    return s;
}

// Returns groups of `members` documents of 1 to 12 tokens. Each document has a target that counts; some targets are
// masked, some count half.
static Stream random_stream(size_t groups, size_t members) {
    size_t length[64], documents = groups * members;
    Stream s;
    Batch *b;
    for (size_t d = 0; d < documents; d++) length[d] = 1 + test_random_below(12);
    s = stream_allocate(length, documents), b = &s.batch;
    for (size_t t = 0; t < b->N; t++) {
        b->targets[t] = test_random_below(4) ? (int32_t)test_random_below(96) : -1;
        b->loss_weight[t] = test_random_below(4) ? 1.0f : test_random_below(4) ? 0.5f : 0.0f;
        s.logp[t] = (double)(float)(-2 * fabs(test_normal()) - 0.01);
        s.entropy[t] = (double)(float)fabs(test_normal());
        b->reference[t] = (float)(s.logp[t] + 0.4 * test_normal());
        b->old[t] = (float)(s.logp[t] + 0.2 * test_normal());
        b->advantage[t] = (float)test_normal();
    }
    for (size_t d = 0; d < documents; d++) {
        size_t counts = b->document_start[d] + test_random_below(length[d]);
        b->targets[counts] = 1, b->loss_weight[counts] = 1.0f;
        b->group[d] = d / members, b->reward[d] = (float)test_normal();
    }
    return s;
}

// Copies target `from` of s to target `to` of p; also works for documents.
static void copy_target(Stream *p, size_t to, const Stream *s, size_t from) {
    Batch *b = &p->batch;
    const Batch *of = &s->batch;
    b->targets[to] = of->targets[from], b->loss_weight[to] = of->loss_weight[from];
    b->advantage[to] = of->advantage[from], b->reference[to] = of->reference[from], b->old[to] = of->old[from];
    p->logp[to] = s->logp[from], p->entropy[to] = s->entropy[from];
}

// Returns a stream of these documents of s, in this order.
static Stream stream_of(const Stream *s, const size_t *document, size_t documents) {
    const size_t *start = s->batch.document_start;
    size_t *length = (size_t *)case_memory(documents * sizeof(*length));
    for (size_t d = 0; d < documents; d++) length[d] = start[document[d] + 1] - start[document[d]];
    Stream p = stream_allocate(length, documents);
    p.batch.kl = s->batch.kl;
    for (size_t d = 0; d < documents; d++) {
        for (size_t i = 0; i < length[d]; i++)
            copy_target(&p, p.batch.document_start[d] + i, s, start[document[d]] + i);
        p.batch.group[d] = s->batch.group[document[d]], p.batch.reward[d] = s->batch.reward[document[d]];
    }
    return p;
}

// Returns the weight of target t in the loss.
static double plain_weight(const Batch *b, size_t t) { return b->targets[t] < 0 ? 0 : (double)b->loss_weight[t]; }

static void *typed(const double *values, size_t count, DType of) {
    void *copy = case_memory(count * sizeof(double));
    for (size_t i = 0; i < count; i++) value_set(copy, of, i, values[i]);
    return copy;
}

// Returns the stream's loss; fills weight[N] and metrics unless NULL.
static double evaluate(const Objective *o, const Stream *s, double Z, double *weight, Metrics *metrics) {
    size_t N = s->batch.N;
    void *logp = typed(s->logp, N, type), *out = case_memory(N * sizeof(double));
    objective_weights(o, &s->batch, Z, 0, N, objective_weights_wait(o) == WEIGHTS_AT_ONCE ? NULL : logp, out, type);
    for (size_t t = 0; t < N && weight; t++) weight[t] = value_at(out, type, t);
    return objective_loss(o, &s->batch, Z, logp, typed(s->entropy, N, type), type, metrics);
}

static double metric_of(const Metrics *m, const char *name) {
    for (size_t i = 0; i < m->count; i++)
        if (!strcmp(m->metric[i].name, name)) return m->metric[i].sum / m->metric[i].count;
    test_fail("no metric \"%s\"", name);
    return NAN;
}

static double normaliser(const Objective *o, const Stream *stream, size_t streams) {
    TargetCounts counts = {0};
    for (size_t i = 0; i < streams; i++) counts = target_counts_add(counts, batch_count(&stream[i].batch));
    return objective_normaliser(o, counts);
}

static void expect_close(const char *what, size_t i, double found, double expected, double scale, double relative) {
    double error = fabs(found - expected), allowed = relative * fmax(fabs(expected), scale);
    if (!(error <= allowed))
        test_fail("%s[%zu] is %.17g, expected %.17g (error %.2g, allowed %.2g)", what, i, found, expected, error,
                  allowed);
    if (allowed > 0) testing.worst = fmax(testing.worst, error / allowed);
}

static double precision(void) { return type == DTYPE_FP64 ? 1e-12 : 1e-6; }

// ---- every objective ------------------------------------------------------------------------------------------------
static Objective make(ObjectiveKind kind, double beta) {
    Objective o = {0};
    o.kind = kind, o.beta = beta, o.gamma = o.clip_low = o.clip_high = NAN;
    o.temperature.divisor = 1, o.completion_tokens = 16;
    o.desirable_weight = 1.5, o.undesirable_weight = 0.75;
    objective_resolve(&o);
    return o;
}

static Objective make_dpo(DpoLoss loss, double beta, double label_smoothing) {
    Objective o = make(OBJECTIVE_DPO, beta);
    o.dpo_loss = loss, o.label_smoothing = label_smoothing;
    return o;
}

static Objective make_policy(ObjectiveKind kind, Normalisation normalisation, double beta) {
    Objective o = make(kind, beta);
    o.normalisation = normalisation;
    if (kind == OBJECTIVE_GSPO) o.clip_low = 0.03, o.clip_high = 0.04;
    if (kind == OBJECTIVE_CISPO) o.clip_high = 1.2;
    return o;
}

// Sets *o to the i-th objective under test; returns 0 after the last.
static int objective_at(size_t i, Objective *o) {
    static const ObjectiveKind of_policy[] = {OBJECTIVE_GRPO, OBJECTIVE_GSPO, OBJECTIVE_PPO, OBJECTIVE_CISPO};
    switch (i) {
    case 0: *o = make(OBJECTIVE_SFT, 0); break;
    case 1: *o = make_dpo(DPO_SIGMOID, 0.4, 0); break;
    case 2: *o = make_dpo(DPO_SIGMOID, 0.4, 0.1); break;
    case 3: *o = make_dpo(DPO_IPO, 0.4, 0); break;
    case 4: *o = make_dpo(DPO_HINGE, 1, 0); break;
    case 5: *o = make(OBJECTIVE_SIMPO, 2); break;
    case 6: *o = make(OBJECTIVE_ORPO, 0.5); break;
    case 7: *o = make_dpo(DPO_ROBUST, 0.4, 0.1); break;
    case 8: *o = make(OBJECTIVE_KTO, 0.4); break;
    case 9: *o = make(OBJECTIVE_KTO, 0.4), o->kto_loss = KTO_APO_ZERO; break;
    default:
        if ((i -= 10) >= 32) return 0;
        *o = make_policy(of_policy[i % 4], (Normalisation)(i / 4 % 4), i / 16 ? 0.05 : 0);
        o->kl_correction = i / 4 % 2;
    }
    test_case("%s, %s, %s, beta %g", objective_names[o->kind], dpo_loss_names[o->dpo_loss],
              normalisation_names[o->normalisation], o->beta);
    return 1;
}

static Stream stream_for(const Objective *o) {
    Stream s = random_stream(6, objective_is_of_pairs(o) ? 2 : 4);
    if (o->kind == OBJECTIVE_KTO) s.batch.kl = 0.7;
    for (size_t d = 0; d < s.batch.documents && o->kind == OBJECTIVE_KTO; d++) s.batch.reward[d] = d % 3 ? 1 : 0;
    return s;
}

// A stream and the objective's results for it
typedef struct {
    Objective o;
    Stream s;
    size_t N;
    double Z, loss, *weight; // [N]
    Metrics metrics;
} Evaluated;

static int evaluated_at(size_t i, Evaluated *e) {
    memset(e, 0, sizeof(*e));
    if (!objective_at(i, &e->o)) return 0;
    e->s = stream_for(&e->o), e->N = e->s.batch.N;
    e->weight = case_doubles(e->N), e->Z = normaliser(&e->o, &e->s, 1);
    e->loss = evaluate(&e->o, &e->s, e->Z, e->weight, &e->metrics);
    return 1;
}

#endif
