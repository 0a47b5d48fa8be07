/*
The loss on a chunk of logits: log-probabilities of the targets, the objective's second value, and the gradient of the
logits. A teacher's values of the chunk are copied to the device for its time alone (objective distill). The verb
logprobs with --top-k collects the likeliest tokens of every chunk on the host.
*/
#ifndef LLMC_HEAD_LOSS_H
#define LLMC_HEAD_LOSS_H
#include "llmc/stream/sequence.h"

// A teacher's values of a chunk of n targets, on the device
typedef struct {
    int32_t *id;         // [n,k]
    Summed *logp, *tail; // [n,k], [n]
} TeacherChunk;

static TeacherChunk push_teacher(const StreamBP *s, size_t n, size_t k) {
    TeacherChunk chunk;
    chunk.id = (int32_t *)arena_push(s->arena, SHARE_LOGITS, "teacher's tokens", n * k, sizeof(int32_t));
    chunk.logp = push_summed(s, SHARE_LOGITS, "teacher's log-probabilities", n * k);
    chunk.tail = push_summed(s, SHARE_LOGITS, "teacher's tails", n);
    return chunk;
}

// Copies count values to the device as sums. values: host
static void teacher_load(const StreamBP *s, Summed *to, const float *values, size_t count) {
    const DType type = dtype_of_sums(s->model->dtype);
    elements_from_float(s->now.host_teacher, type, values, count);
    s->ops->copy_in(to, s->now.host_teacher, count * dtype_size(type));
}

static void teacher_store(const StreamBP *s, float *values, Summed *from, size_t count) {
    const DType type = dtype_of_sums(s->model->dtype);
    s->ops->copy_out(s->now.host_teacher, from, count * dtype_size(type));
    for (size_t i = 0; i < count; i++) values[i] = (float)value_at(s->now.host_teacher, type, i);
}

// Finds the likeliest tokens of chunk c's targets, into s->now.found.
static void likeliest_collect(const StreamBP *s, Chunk c, const Stored *logits) {
    const Shapes d = shapes_of(s->model);
    const size_t k = s->setup->top_k, mark = arena_mark(s->arena);
    const TeacherChunk found = push_teacher(s, c.n, k);
    const BatchTeacher *host = &s->now.found;
    s->ops->likeliest(found.id, found.logp, found.tail, logits, s->now.targets + c.row, c.n, s->setup->vocabulary, k,
                      d.logits_stride, s->setup->objective.temperature);
    if (has_values(s)) {
        s->ops->copy_out(host->id + c.token * k, found.id, c.n * k * sizeof(int32_t));
        teacher_store(s, host->logp + c.token * k, found.logp, c.n * k);
        teacher_store(s, host->tail + c.token, found.tail, c.n);
    }
    arena_pop(s->arena, mark);
}

// Computes log-probabilities and divergences of chunk c's targets. weight NULL: the logits stay
static void distill_chunk(const StreamBP *s, Chunk c, Stored *logits, const Summed *weight) {
    const Shapes d = shapes_of(s->model);
    const Objective *o = &s->setup->objective;
    const size_t k = s->setup->teacher_k, mark = arena_mark(s->arena);
    const TeacherChunk teacher = push_teacher(s, c.n, k);
    Summed *scratch = push_summed(s, SHARE_LOGITS, "saved logits", c.n * k);
    const Distillation how = {o->temperature, o->distill_temperature, o->distill_share};
    if (has_values(s)) {
        const BatchTeacher *host = &s->now.texts->teacher;
        if (host->k != k)
            die("internal: a teacher of %zu tokens, but the run was set up for %zu; please report it", host->k, k);
        s->ops->copy_in(teacher.id, host->id + c.token * k, c.n * k * sizeof(int32_t));
        teacher_load(s, teacher.logp, host->logp + c.token * k, c.n * k);
        teacher_load(s, teacher.tail, host->tail + c.token, c.n);
    }
    s->ops->distill(summed_row(s, s->now.logp, c.row, 1), summed_row(s, s->now.entropy, c.row, 1), logits,
                    s->now.targets + c.row, teacher.id, teacher.logp, teacher.tail, weight, c.n, d.V, k,
                    d.logits_stride, how, scratch);
    arena_pop(s->arena, mark);
}

// Computes log-probabilities of the targets of chunk v->c from its logits, and the objective's second values. gradient:
// 1: the logits become their gradient by the token weights; second values only of a divergence
static void head_loss(const Visit *v, Stored *logits, int gradient) {
    const StreamBP *s = v->s;
    const Chunk c = v->c;
    const Shapes d = shapes_of(s->model);
    Summed *entropy = s->now.entropy && !gradient ? summed_row(s, s->now.entropy, c.row, 1) : NULL;
    const Summed *weight = gradient ? summed_row(s, s->now.token_weight, c.row, 1) : NULL;
    if (objective_needs_top(&s->setup->objective)) {
        distill_chunk(s, c, logits, weight);
        return;
    }
    s->ops->logprob(summed_row(s, s->now.logp, c.row, 1), entropy, logits, s->now.targets + c.row, weight, c.n,
                    s->setup->vocabulary ? s->setup->vocabulary : d.V, d.logits_stride,
                    s->setup->objective.temperature);
    if (s->setup->top_k && !gradient) likeliest_collect(s, c, logits);
}

#endif
