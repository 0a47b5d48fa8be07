/*
`plan --teacher`: a teacher that runs with its student (llmc/train/reference.h). A run allocates the teacher first, so
it is planned first, and the student with the rest. The estimate of a step includes the teacher's passes. On a named
machine the place of the teacher's weights is the one with the shortest step. In place of the teacher a file of its
likeliest tokens may be read (llmc/data/teacher.h).
*/
#ifndef LLMC_PLAN_TEACHER_H
#define LLMC_PLAN_TEACHER_H
#include "llmc/train/reference.h"
#include "ways.h"

// A teacher with its weights in one place
typedef struct {
    LiveTeacher *live;
    Place on;
    WayBounds left;     // the student's bounds, without the teacher's memory
    WayToTrain way;     // the teacher's
    WayToTrain student; // the student beside it, in plans that are compared
} TeacherPlan;

typedef struct {
    TeacherPlan chosen, other[PLACES]; // as --teacher-on; other places
    size_t others;
} TeacherPlans;

// Plans the teacher of `run` and sets run->live. on: place of its weights, or PLACE_AUTO; data: NULL without shards
static void plan_teacher(TeacherPlan *t, Run *run, const DataLoader *data, const WayBounds *bounds, Place on) {
    const Options *o = run->options;
    memset(t, 0, sizeof(*t));
    t->live = (LiveTeacher *)checked_calloc(1, sizeof(*t->live), "a teacher");
    t->live->options = live_options(o, run->model.config.vocab_size);
    t->live->options.verb = VERB_PLAN, t->live->options.plan_for = VERB_LOGPROBS, t->live->options.quiet = 1;
    t->live->options.weights = on;
    run_open(&t->live->run, &t->live->options, NULL);
    if (data) live_check(&t->live->run, run, data);
    way_open(&t->way, &t->live->run, 0);
    way_choose(&t->way, bounds);
    t->live->run.settings = t->way.run.settings, t->live->run.plan = t->way.run.plan;
    const Place placed = t->way.run.settings.place[PLACED_WEIGHTS];
    t->on = placed > PLACE_DEVICE ? placed : PLACE_DEVICE;
    t->left = *bounds, t->left.teacher_seconds = t->way.estimate.seconds;
    const size_t taken = t->way.bytes[PLACE_DEVICE];
    const int each = o->memory_limit && !o->card; // the limit holds for each of the two models
    if (t->left.limit && !each) t->left.limit = t->left.limit > taken ? t->left.limit - taken : 1;
    run->live = &t->live->run;
}

// Plans the teacher as a run places it. Refuses a teacher that does not fit. The student keeps what *bounds is then.
static void plan_teacher_first(TeacherPlans *t, Run *run, const DataLoader *data, WayBounds *bounds) {
    plan_teacher(&t->chosen, run, data, bounds, run->options->teacher_on);
    const WayToTrain *way = &t->chosen.way;
    WayToTrain has = *way; // its bytes: the limits of the places that the teacher takes
    char bytes[2][96];
    const Limits limits = run_search(&t->chosen.live->run, bounds->limit).limits;
    for (int place = PLACE_DEVICE; place < PLACES; place++)
        has.bytes[place] = way->bytes[place] && limits.bytes[place] < SIZE_MAX ? limits.bytes[place] : 0;
    if (!way->fits)
        die("--teacher %s: does not fit: needs %s; the device has %s; give --teacher-base nf4, another --teacher-on, a "
            "larger --machine, or a shorter --seq-len",
            run->options->teacher, way_bytes(way, bytes[0]), way_bytes(&has, bytes[1]));
    *bounds = t->chosen.left;
}

static void plan_student(TeacherPlan *t, Run *run) {
    way_open(&t->student, run, run->settings.lora != NULL);
    if (t->way.fits) way_choose(&t->student, &t->left);
    way_close(&t->student, run);
}

static int plan_both_fit(const TeacherPlan *t) { return t->way.fits && t->student.fits; }

// Plans the teacher. On a machine without --teacher-on, plans student and teacher with the teacher's weights in each
// place, and takes the place with the shortest step, as --teacher-on.
static void plan_teachers(TeacherPlans *t, Run *run, Options *o, const DataLoader *data, WayBounds *bounds) {
    const WayBounds open = *bounds; // before any teacher
    const int compares = option_given(o, "machine") && o->teacher_on == PLACE_AUTO;
    plan_teacher_first(t, run, data, bounds);
    if (!compares) return;
    const unsigned places = run_search(run->live, open.limit).places[PLACED_WEIGHTS];
    const TeacherPlan *best = &t->chosen;
    plan_student(&t->chosen, run);
    for (int on = PLACE_DEVICE; on < PLACES; on++) {
        TeacherPlan *other = &t->other[t->others];
        if (on == (int)t->chosen.on || !(places & 1u << on)) continue;
        plan_teacher(other, run, data, &open, (Place)on);
        plan_student(other, run);
        t->others += (size_t)plan_both_fit(other);
        run_close(&other->live->run), free(other->live);
        const double least = best->student.estimate.seconds;
        if (plan_both_fit(other) && (!plan_both_fit(best) || other->student.estimate.seconds < 0.99 * least))
            best = other;
    }
    run->live = &t->chosen.live->run;
    if (best == &t->chosen) return;
    option_type(o, "teacher-on", place_names[best->on]);
    run_close(run->live), free(t->chosen.live);
    const TeacherPlan first = t->chosen;
    TeacherPlan *left = &t->other[best - t->other];
    *bounds = open;
    plan_teacher_first(t, run, data, bounds);
    *left = first;
    if (!plan_both_fit(left)) *left = t->other[--t->others];
}

// Returns the bytes of the teacher's weights that a step reads from host memory or a disk.
static double teacher_moved(const WayToTrain *teacher) {
    return moved_in_step(&teacher->run, WAY_HOST_IN) + moved_in_step(&teacher->run, WAY_DISK_IN);
}

// Returns the bytes of a token in a file of this teacher.
static size_t teacher_file_record(const Run *run) {
    return logprobs_record(objective_needs_top(&run->settings.objective) ? run->settings.teacher_k : 0);
}

// Prints the teacher, how often its weights are read, a file in its place, and other places. tokens: of a step
static void teacher_print(FILE *out, const Run *run, const TeacherPlans *plans, double tokens) {
    const WayToTrain *t = &plans->chosen.way;
    const size_t record = teacher_file_record(run), reads = assigned_batches(run->assignment);
    const Storage *storage = t->run.settings.storage;
    char bytes[2][96], seconds[2][32];
    fprintf(out, "teacher   %s, %s parameters%s, --teacher-on %s: %s", t->run.model.config.family->name,
            human_count((double)t->run.model.elements), storage && quant_bits(storage->type) == 4 ? " in 4 bits" : "",
            place_names[plans->chosen.on], way_bytes(t, bytes[0]));
    if (t->estimate.seconds > 0) fprintf(out, "; %s of the step", way_seconds(t, seconds[0]));
    fputs("\n          its weights are read once a micro-batch", out);
    if (!run->options->rollout) fprintf(out, ", %zu time%s a step", reads, reads == 1 ? "" : "s");
    if (teacher_moved(t) > 0 && !run->options->rollout) fprintf(out, ": %s", human_bytes(teacher_moved(t)));
    if (!run->options->rollout)
        fprintf(out, "\n          or a file: %zu bytes a token, %zu GB for 10^9 tokens; a step reads %s", record,
                record, human_bytes(tokens * (double)record));
    fputc('\n', out);
    for (size_t i = 0; i < plans->others; i++) {
        const TeacherPlan *other = &plans->other[i];
        fprintf(out, "          --teacher-on %s: ", place_names[other->on]);
        if (other->student.estimate.seconds > 0)
            fprintf(out, "a step of %s, teacher %s; ", way_seconds(&other->student, seconds[0]),
                    way_seconds(&other->way, seconds[1]));
        fprintf(out, "teacher %s; student %s\n", way_bytes(&other->way, bytes[0]),
                way_bytes(&other->student, bytes[1]));
    }
}

// Writes bytes and seconds of a teacher into an open object.
static void teacher_way_json(JsonOut *json, const TeacherPlan *t) {
    json_text(json, "weights", place_names[t->on]);
    json_size(json, "total_bytes", t->way.bytes[PLACE_DEVICE]);
    json_size(json, "host_bytes", t->way.bytes[PLACE_HOST]);
    json_size(json, "disk_bytes", t->way.bytes[PLACE_DISK]);
    json_number(json, "estimated_seconds", t->way.estimate.seconds > 0 ? t->way.estimate.seconds : NAN);
}

// Writes the teacher into an open object.
static void teacher_json(JsonOut *json, const Run *run, const TeacherPlans *plans) {
    json_object(json, "teacher");
    teacher_way_json(json, &plans->chosen);
    json_size(json, "parameters", plans->chosen.way.run.model.elements);
    json_size(json, "weight_reads", assigned_batches(run->assignment));
    json_number(json, "moved_bytes", teacher_moved(&plans->chosen.way));
    json_size(json, "file_bytes_per_token", teacher_file_record(run));
    json_array(json, "others");
    for (size_t i = 0; i < plans->others; i++) {
        const WayToTrain *student = &plans->other[i].student;
        json_object(json, NULL);
        teacher_way_json(json, &plans->other[i]);
        json_number(json, "step_seconds", student->estimate.seconds > 0 ? student->estimate.seconds : NAN);
        json_object_end(json);
    }
    json_array_end(json);
    json_object_end(json);
}

#endif
