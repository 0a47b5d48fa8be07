/*
The verb `doctor` tells whether a machine is fit for a run. It prints a line per check, then a verdict. It checks
devices, driver and libraries, a small plan against the memory that it really takes, rates, and with several ranks the
collectives (doctor_ranks.h). Every op is compared with a reference (doctor_ops.h); ops that are right have a line only
with --verbose.

Rows are independent: an error that would end a run becomes a row's text. If a row takes too long, a watching thread
ends the program, whatever the row hangs in. With several ranks a row reports the first rank that found something.
*/
#ifndef LLMC_DOCTOR_H
#define LLMC_DOCTOR_H
#include "llmc/run/threads.h"
#include "llmc/run/allocate.h"
#include "llmc/ops/link_rates.h"
#include "bp.h"
#include "doctor_ops.h"
#include "ways.h"
#include "doctor_ranks.h"
#include <pthread.h>
#include <setjmp.h>

#define DOCTOR_MODEL "qwen3-0.6b" // model of the checks if --init is not given
#define DOCTOR_ROWS  128

typedef struct {
    char name[32], text[320];
    Finding finding;
    int op; // 1: a row of op_cases
    double seconds;
    double value; // NAN: no value
    char unit[8]; // unit of value
} DoctorRow;

typedef void DoctorLook(DoctorRow *row, size_t i); // Fills row i of a kind.

// The pass of --report
typedef struct {
    char options[2300];
    double seconds, planned, loss, grad_norm; // planned: by a known card's rates, else NAN
    size_t tokens, plan_bytes, peak_bytes, chunk;
    int cudnn; // attention by cuDNN
} ReportPass;

static struct {
    const Options *options;
    Config config;
    const Ops *ops; // op set whose ops are checked
    FILE *text;
    DoctorRow row[DOCTOR_ROWS];
    size_t rows, wrong, not_checked;
    int lost;               // 1: the device no longer works
    const Machine *machine; // machine whose rates are expected; NULL: unknown
    int hopper;             // 1: the device has the instructions of STREAMBP_WGMMA's kernels
    ReportPass pass;        // tokens 0: not measured
    Progress bar;           // counts rows
    // the running row, for the watching thread
    pthread_mutex_t lock;
    const char *running;
    double begun, patience; // in seconds
    jmp_buf failure;
    char error[DIE_MESSAGE];
} doctor;

// ---- rows ----------------------------------------------------------------------------------------------------------
// Counts a row and prints it at once, even into a pipe.
static void doctor_add(const DoctorRow *row) {
    static const char *const words[FINDINGS] = {"ok", "note", "WRONG"};
    const Options *o = doctor.options;
    doctor.wrong += row->finding == FINDING_WRONG;
    if (doctor.rows < DOCTOR_ROWS) doctor.row[doctor.rows++] = *row;
    if (row->finding == FINDING_OK ? o->quiet || (row->op && !o->verbose) : o->quiet && o->json) return;
    progress_clear(&doctor.bar);
    fprintf(doctor.text, "%-6s %-24s %s\n", words[row->finding], row->name, row->text);
    fflush(doctor.text);
}

__attribute__((format(printf, 3, 4))) static void doctor_say(DoctorRow *row, Finding finding, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    row->finding = finding;
    vsnprintf(row->text, sizeof(row->text), format, arguments);
    make_printable(row->text);
    va_end(arguments);
}

static void doctor_value(DoctorRow *row, double value, const char *unit) {
    row->value = value;
    snprintf(row->unit, sizeof(row->unit), "%s", unit);
}

static void doctor_json(void) {
    static const char *const words[FINDINGS] = {"ok", "note", "wrong"};
    JsonOut json = json_open(stdout);
    json_bool(&json, "ok", doctor.wrong == 0);
    json_text(&json, "version", program_version());
    json_text(&json, "commit", program_commit());
    json_text(&json, "op_set", ops_device->name);
    json_text(&json, "dtype", dtype_name(ops_device->stored));
    json_text(&json, "libraries", libraries_text(ops_device));
    json_size(&json, "ranks", dist_ranks());
    json_size(&json, "wrong", doctor.wrong);
    json_size(&json, "not_checked", doctor.not_checked);
    json_array(&json, "rows");
    for (const DoctorRow *row = doctor.row; row < doctor.row + doctor.rows; row++) {
        json_object(&json, NULL);
        json_text(&json, "name", row->name);
        json_text(&json, "finding", words[row->finding]);
        json_text(&json, "text", row->text);
        json_number(&json, "value", row->value);
        json_text(&json, "unit", *row->unit ? row->unit : NULL);
        json_number(&json, "seconds", row->seconds);
        json_object_end(&json);
    }
    json_array_end(&json);
    json_finish(&json);
}

// ---- --report ------------------------------------------------------------------------------------------------------
static const DoctorRow *doctor_find(const char *name) {
    for (const DoctorRow *row = doctor.row; row < doctor.row + doctor.rows; row++)
        if (!strcmp(row->name, name)) return row;
    return NULL;
}

// Writes versions and the name of the device, without paths.
static void report_machine_json(JsonOut *json) {
    static const char *const libraries[] = {"cuBLASLt", "cuDNN", "NCCL", "oneDNN"};
    const DoctorRow *processor = doctor_find("processor"), *driver = doctor_find("driver");
    const int gpu = *ops_device->device_name() != 0;
    char device[128] = "", version[64] = "", list[200] = "";
    snprintf(device, sizeof(device), "%.100s", gpu ? ops_device->device_name() : processor ? processor->text : "");
    if (!gpu) device[strcspn(device, ",:")] = 0;
    json_text(json, "device_name", device);
    json_bool(json, "on_gpu", gpu);
    for (const char *word = driver && gpu ? driver->text : ""; *word; word += strcspn(word, " "), word += *word == ' ')
        if (!*version && isdigit((unsigned char)*word) && memchr(word, '.', strcspn(word, " ,")))
            snprintf(version, sizeof(version), "%.*s", (int)strcspn(word, " ,"), word);
    json_text(json, "driver", *version ? version : gpu ? "unknown" : "none");
    for (size_t i = 0; i < sizeof(libraries) / sizeof(*libraries); i++) {
        const DoctorRow *row = doctor_find(libraries[i]);
        if (!row || !isdigit((unsigned char)*row->text)) continue;
        snprintf(list + strlen(list), sizeof(list) - strlen(list), "%s%s %.*s", *list ? ", " : "", row->name,
                 (int)min_size(strcspn(row->text, ",: "), 20), row->text);
    }
    json_text(json, "libraries", list);
    json_text(json, "op_set", ops_device->name);
    json_text(json, "dtype", dtype_name(ops_device->stored));
}

static void report_pass_json(JsonOut *json) {
    const ReportPass *pass = &doctor.pass;
    json_array(json, "rows");
    if (pass->tokens) {
        json_object(json, NULL);
        json_text(json, "options", pass->options);
        json_number(json, "seconds", pass->seconds);
        json_number(json, "planned_seconds", pass->planned);
        json_size(json, "tokens", pass->tokens);
        json_size(json, "plan_bytes", pass->plan_bytes);
        json_size(json, "peak_bytes", pass->peak_bytes);
        json_number(json, "loss", pass->loss);
        json_number(json, "grad_norm", pass->grad_norm);
        json_size(json, "chunk", pass->chunk);
        json_text(json, "attention", pass->cudnn ? "cudnn" : "own");
        json_object_end(json);
    }
    json_array_end(json);
}

// Prints a record for dev/results, in the form that scripts/add_report.py checks.
static void doctor_report(void) {
    const Options *o = doctor.options;
    const time_t now = time(NULL);
    char date[16] = "", command[2400] = "train doctor --report";
    struct tm utc;
    if (gmtime_r(&now, &utc)) strftime(date, sizeof(date), "%Y-%m-%d", &utc);
    if (o->init) snprintf(command + strlen(command), sizeof(command) - strlen(command), " --init %.2048s", o->init);
    snprintf(command + strlen(command), sizeof(command) - strlen(command), " --seq-len %zu", o->seq_len);
    JsonOut json = json_open(stdout);
    json_text(&json, "kind", "report");
    report_machine_json(&json);
    json_text(&json, "date", date);
    json_text(&json, "commit", program_commit());
    json_text(&json, "version", program_version());
    json_text(&json, "command", command);
    json_bool(&json, "right", doctor.wrong == 0 && doctor.not_checked == 0);
    json_array(&json, "wrong");
    for (const DoctorRow *row = doctor.row; row < doctor.row + doctor.rows; row++)
        if (row->finding == FINDING_WRONG) json_text(&json, NULL, row->name);
    json_array_end(&json);
    json_object(&json, "rates");
    for (const DoctorRow *row = doctor.row; row < doctor.row + doctor.rows; row++)
        if (strstr(row->unit, "/s")) json_number(&json, row->name, row->value);
    json_object_end(&json);
    report_pass_json(&json);
    json_finish(&json);
    fputs("report   the line above; nothing was sent. Paste it into an issue \"Report of a machine\", or type: "
          "python3 scripts/add_report.py FILE\n",
          doctor.text);
}

// Prints "all right", or how many things are wrong and which.
static void doctor_verdict(void) {
    size_t ops = 0;
    char names[256] = "";
    for (const DoctorRow *row = doctor.row; row < doctor.row + doctor.rows; row++) {
        ops += row->op && row->finding != FINDING_WRONG;
        if (row->finding != FINDING_WRONG) continue;
        snprintf(names + strlen(names), sizeof(names) - strlen(names), "%s%.31s", *names ? ", " : "", row->name);
    }
    if (!doctor.wrong)
        fprintf(doctor.text, "doctor   all right: %zu ops, %zu other rows", ops, doctor.rows - ops);
    else
        fprintf(doctor.text, "doctor   %zu thing%s wrong: %s; %zu ops right", doctor.wrong,
                doctor.wrong == 1 ? " is" : "s are", names, ops);
    if (doctor.not_checked) fprintf(doctor.text, "; %zu were not checked without a device", doctor.not_checked);
    fputc('\n', doctor.text);
}

static void doctor_end(void) {
    progress_end(&doctor.bar);
    doctor_verdict();
    fflush(doctor.text);
    if (doctor.options->report)
        doctor_report();
    else if (doctor.options->json)
        doctor_json();
}

// ---- a row that hangs ----------------------------------------------------------------------------------------------
static void *doctor_watch(void *nothing) {
    const struct timespec pause = {0, 20000000};
    DoctorRow row = {0};
    for (;;) {
        nanosleep(&pause, NULL);
        pthread_mutex_lock(&doctor.lock);
        row.seconds = seconds_now() - doctor.begun, row.value = NAN;
        if (doctor.running && row.seconds > doctor.patience) break;
        pthread_mutex_unlock(&doctor.lock);
    }
    // keeps the lock: a row that ends after all now waits for the end of the program
    snprintf(row.name, sizeof(row.name), "%s", doctor.running);
    doctor_say(&row, FINDING_WRONG, "%shangs, or takes more than %.0f s%s", voice.name, doctor.patience,
               strcmp(ops_device->name, "cuda") ? "" : "; nvidia-smi and `dmesg | grep Xid` tell of a GPU's faults");
    if (!is_main_rank()) fprintf(stderr, "%s: %s: %s\n", program_invocation_short_name, row.name, row.text);
    doctor_add(&row);
    doctor_end();
    fflush(NULL);
    _exit(EXIT_RUNTIME);
    return nothing;
}

static void doctor_running(const char *name) {
    pthread_mutex_lock(&doctor.lock);
    doctor.running = name, doctor.begun = seconds_now();
    pthread_mutex_unlock(&doctor.lock);
}

// ---- a row that fails ----------------------------------------------------------------------------------------------
static void doctor_caught(int code, const char *message) {
    (void)code;
    snprintf(doctor.error, sizeof(doctor.error), "%s", message);
    die_caught = NULL;
    longjmp(doctor.failure, 1);
}

// Runs a check. Returns 0 if it tried to end the program; the message is then in doctor.error.
static int doctor_try(DoctorLook *look, DoctorRow *row, size_t i) {
    if (setjmp(doctor.failure)) return 0;
    die_caught = doctor_caught;
    look(row, i);
    die_caught = NULL;
    return 1;
}

// Tries the device.
static void doctor_probe(DoctorRow *row, size_t i) {
    void *memory = doctor.ops->allocate(1 << 20);
    (void)row, (void)i;
    if (!memory) die("no memory is left; end other programs that use it");
    doctor.ops->zero(memory, 1 << 20);
    doctor.ops->finish();
    doctor.ops->release(memory, 1 << 20);
}

// Replaces the row by that of the first rank that found something. Collective.
static void doctor_agree(DoctorRow *row) {
    size_t whose;
    if (dist_ranks() == 1) return;
    if (dist_smallest((size_t)(FINDINGS - row->finding), &whose) == FINDINGS - FINDING_OK) return;
    dist_broadcast(RANKS_ALL, row, sizeof(*row), whose);
    if (!whose) return;
    memmove(row->text + 8, row->text, sizeof(row->text) - 8), row->text[sizeof(row->text) - 1] = 0;
    char rank[16];
    memcpy(row->text, rank, (size_t)snprintf(rank, sizeof(rank), "rank %2zu ", whose % 100));
}

// Makes row i of a kind. A check that communicates is not caught, because the other ranks would wait for this one.
static void doctor_row(const char *name, DoctorLook *look, size_t i, int communicates) {
    DoctorRow row = {0};
    size_t lost;
    int ended = 1;
    if (doctor.lost) {
        doctor.not_checked++;
        return;
    }
    snprintf(row.name, sizeof(row.name), "%s", name);
    row.value = NAN;
    snprintf(doctor.bar.label, sizeof(doctor.bar.label), "%s", name);
    progress_update(&doctor.bar, (double)doctor.rows);
    doctor_running(name);
    const double begin = seconds_now();
    if (communicates && dist_ranks() > 1)
        look(&row, i);
    else
        ended = doctor_try(look, &row, i);
    if (!ended) doctor_say(&row, FINDING_WRONG, "%s", doctor.error);
    if (!ended && !doctor_try(doctor_probe, &row, 0)) doctor.lost = 1;
    if (!ended && !doctor.lost) check_end(); // ends a case that was left unfinished
    row.seconds = seconds_now() - begin;
    doctor_agree(&row);
    if (dist_smallest(!doctor.lost, &lost) == 0 && dist_ranks() > 1) doctor.lost = 1;
    doctor_running(NULL);
    if (*row.name) doctor_add(&row);
}

// ---- the machine ---------------------------------------------------------------------------------------------------
__attribute__((format(printf, 3, 4))) static void doctor_tell(const char *name, Finding finding, const char *format,
                                                              ...) {
    DoctorRow row = {.value = NAN};
    char text[sizeof(row.text)];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    snprintf(row.name, sizeof(row.name), "%s", name);
    doctor_say(&row, finding, "%s", text);
    if (!strncmp(name, "device", 6) && ops_device->stored == DTYPE_BF16 && machine_of_device(row.text))
        doctor.machine = machine_of_device(row.text);
    if (!strncmp(name, "device", 6) && strstr(row.text, "compute capability 9.0")) doctor.hopper = 1;
    doctor_add(&row);
}

// Looks at the machine. Each finding has a separate row, on the first rank. The row `machine` is left out if a finding
// is wrong.
static void look_at_machine(DoctorRow *row, size_t i) {
    (void)i;
    const char *problem = doctor.ops->device_problem();
    doctor.ops->machine_findings(doctor_tell);
    doctor.lost = problem != NULL;
    if (problem || doctor.wrong)
        doctor_say(row, FINDING_WRONG, "%s",
                   problem ? problem : "this rank's machine has faults: run doctor there to list them");
    else
        doctor_say(row, FINDING_OK, "op set %s, %s, %s", doctor.ops->name, dtype_name(doctor.ops->stored),
                   libraries_text(doctor.ops));
    if (doctor.wrong && is_main_rank()) *row->name = 0;
}

// Connects the ranks, at the first allocation.
static void look_at_connections(DoctorRow *row, size_t i) {
    const World world = {dist_ranks(), dist_rank(), 0, 1};
    const size_t before = doctor.ops->memory_peak();
    doctor_probe(row, i);
    const size_t after = doctor.ops->memory_peak(), planned = collectives_bytes(world, 0);
    doctor_value(row, (double)(after - before), "bytes");
    const int more = after - before > planned;
    doctor_say(row, more ? FINDING_NOTE : FINDING_OK,
               "%zu ranks: %s in use before, %s after NCCL connected them; plans leave %s%s", world.ranks,
               human_bytes((double)before), human_bytes((double)after), human_bytes((double)planned),
               more ? ": lower --memory-limit of plans by the difference, and report this line" : "");
}

// ---- a small plan --------------------------------------------------------------------------------------------------
typedef struct {
    size_t planned, peak, elements;
    DType type;
    void *gradient; // on the host, [elements]
} SmallPass;

// Runs a pass of two layers of the model's widths with a small vocabulary.
static SmallPass small_pass(Method method) {
    char text[2048];
    Options o = *doctor.options;
    Config config = doctor.config;
    Run run;
    SmallPass pass = {0};
    config.num_hidden_layers = 2, config.vocab_size = min_size(config.vocab_size, 2048);
    config.num_kv_shared_layers = 0;
    config.vocab_size_per_layer_input = min_size(config.vocab_size_per_layer_input, config.vocab_size);
    config_to_text(&config, text, sizeof(text));
    o.verb = VERB_BP, o.init = text, o.quiet = 1, o.json = 0, o.method = method, o.batch = dist_ranks(), o.repeat = 1;
    o.seq_len = min_size(min_size(o.seq_len, 192), config.max_position_embeddings);
    if (method == METHOD_STREAM) o.chunk = o.seq_len / 2 + 1, o.logits_chunk = o.seq_len / 3 + 1;
    run_open(&run, &o, NULL);
    run_allocate(&run, run_bound(&run, NULL));
    Batch batch = batch_allocate(o.batch * o.seq_len, o.batch);
    run_load_weights(&run);
    PassResult result = bp_measure(&run, NULL, &batch);
    pass.planned = run.plan.total_bytes, pass.peak = result.peak_bytes;
    pass.elements = run.model.elements, pass.type = run.settings.gradient_type;
    pass.gradient = checked_malloc(pass.elements * dtype_size(pass.type), "gradients");
    ops_device->copy_out(pass.gradient, run.streambp.memory.gradients, pass.elements * dtype_size(pass.type));
    free(result.seconds_each);
    batch_free(&batch);
    run_close(&run);
    return pass;
}

static void look_at_plan(DoctorRow *row, size_t i) {
    // memory of libraries and kernels' code, or of this process's threads and libraries
    const size_t threads = ((size_t)64 << 20) + ((size_t)32 << 20) * (size_t)cpu_threads();
    const size_t beside = !strcmp(ops_device->name, "cpu") ? threads : (size_t)1 << 30;
    const DType type = ops_device->stored;
    const double bound = type == DTYPE_BF16 ? 0.05 : type == DTYPE_FP32 ? 1e-4 : 1e-10;
    SmallPass stream = small_pass(METHOD_STREAM), full = small_pass(METHOD_FULL);
    double error = 0, size = 0;
    const char *planned = human_bytes((double)stream.planned), *peak = human_bytes((double)stream.peak);
    (void)i;
    for (size_t k = 0; k < full.elements; k++) {
        const double a = element_to_double(stream.gradient, stream.type, k);
        const double b = element_to_double(full.gradient, full.type, k);
        error += (a - b) * (a - b), size += b * b;
    }
    free(stream.gradient), free(full.gradient);
    error = sqrt(error / size);
    doctor_value(row, (double)stream.peak, "bytes");
    if (!(error <= bound))
        doctor_say(row, FINDING_WRONG,
                   "gradients of --method stream and full differ by %.2g of their size, rounding is at most %.2g; the "
                   "rows below show which op is wrong",
                   error, bound);
    else if (stream.peak > stream.planned + beside)
        doctor_say(row, FINDING_WRONG,
                   "a plan of %s took %s: lower --memory-limit of runs by the difference, and report it", planned,
                   peak);
    else
        doctor_say(row, FINDING_OK, "two layers: %s planned, %s in use with libraries; stream and full differ by %.1g",
                   planned, peak, error);
}

// ---- the pass of --report ------------------------------------------------------------------------------------------
enum { REPORT_TOKENS = 8192, REPORT_LAYERS = 2, REPORT_WORDS = 32000 }; // at least, on a GPU; at most, on a CPU

// Shortens the model for a CPU. Writes it as --init takes it.
static void report_model_text(char *text, size_t room) {
    const Config *c = &doctor.config;
    snprintf(text, room, "%s", doctor.options->init ? doctor.options->init : DOCTOR_MODEL);
    if (*ops_device->device_name()) return;
    const struct {
        const char *key;
        size_t value, most;
    } keys[] = {{"num_hidden_layers", c->num_hidden_layers, REPORT_LAYERS},
                {"vocab_size", c->vocab_size, REPORT_WORDS},
                {"num_kv_shared_layers", c->num_kv_shared_layers, 0},
                {"vocab_size_per_layer_input", c->vocab_size_per_layer_input, REPORT_WORDS}};
    for (size_t i = 0; i < sizeof(keys) / sizeof(*keys); i++)
        if (keys[i].value > keys[i].most)
            snprintf(text + strlen(text), room - strlen(text), ",%s=%zu", keys[i].key, keys[i].most);
}

static void look_at_pass(DoctorRow *row, size_t i) {
    char model[2200];
    Options o = *doctor.options;
    ReportPass *pass = &doctor.pass;
    Run run;
    (void)i;
    report_model_text(model, sizeof(model));
    o.verb = VERB_BP, o.init = model, o.quiet = 1, o.json = 0, o.repeat = 3;
    if (*ops_device->device_name()) o.seq_len = max_size(o.seq_len, REPORT_TOKENS);
    option_type(&o, "keep", "none");
    run_open(&run, &o, NULL);
    run_allocate(&run, run_bound(&run, NULL));
    Batch batch = batch_allocate(o.seq_len, 1);
    run_load_weights(&run);
    const PassResult result = bp_measure(&run, NULL, &batch);
    const StepShape step = {1, result.tokens, result.model_flops, result.full_flops};
    pass->planned = doctor.machine ? estimate_step(doctor.machine, &run.settings, &batch, step).seconds : NAN;
    pass->seconds = result.seconds, pass->loss = result.loss, pass->grad_norm = result.grad_norm;
    pass->plan_bytes = run.plan.total_bytes, pass->peak_bytes = result.peak_bytes, pass->chunk = run.plan.chunk;
    pass->cudnn = run.attention != NULL;
    snprintf(pass->options, sizeof(pass->options), "--init %s --seq-len %zu --keep none --repeat 3", model, o.seq_len);
    pass->tokens = (size_t)result.tokens;
    free(result.seconds_each);
    batch_free(&batch);
    run_close(&run);
    doctor_value(row, (double)pass->peak_bytes, "bytes");
    char planned[32] = "";
    if (pass->planned > 0) snprintf(planned, sizeof(planned), ", planned %.4g s", pass->planned);
    doctor_say(row, pass->seconds > 1.1 * pass->planned ? FINDING_NOTE : FINDING_OK,
               "%zu tokens in %.4g s%s; %s planned, %s in use", pass->tokens, pass->seconds, planned,
               human_bytes((double)pass->plan_bytes), human_bytes((double)pass->peak_bytes));
}

// ---- rates ---------------------------------------------------------------------------------------------------------
enum { RATE_REPEATS = 5 };

// Writes a rate: "612 GB/s; 4080 expected of an H200 SXM". Less than half of the expected rate is a note. More than
// twice is wrong, as when kernels do not run.
static void doctor_rate(DoctorRow *row, double rate, MachineConstant constant, double share, const char *what) {
    const Machine *machine = doctor.machine;
    const double unit = machine_constants[constant].unit, expected = machine ? share * machine->value[constant] : 0;
    doctor_value(row, rate, unit == 1e9 ? "byte/s" : "FLOP/s");
    if (!machine)
        doctor_say(row, FINDING_OK, "%.4g%s, %s", rate / unit, machine_constants[constant].suffix, what);
    else
        doctor_say(row,
                   rate > 2 * expected     ? FINDING_WRONG
                   : rate < 0.5 * expected ? FINDING_NOTE
                                           : FINDING_OK,
                   "%.4g%s, %s; %.4g expected of an %s%s", rate / unit, machine_constants[constant].suffix, what,
                   expected / unit, machine->gpu,
                   rate > 2 * expected     ? ": more than it can do, so part of the work was not done; report this line"
                   : rate < 0.5 * expected ? ": another program may use it; type nvidia-smi -q -d PERFORMANCE,CLOCK"
                                           : "");
}

// Allocates buffers for timing: halves `most` until it fits. *bytes: their size
static void *rate_memory(size_t most, size_t *bytes) {
    for (*bytes = most; *bytes >= 1 << 16; *bytes /= 2) {
        void *memory = doctor.ops->allocate(*bytes);
        if (memory) return memory;
    }
    die("no memory is left for %s; end other programs that use it", human_bytes((double)*bytes));
}

static void look_at_copies(DoctorRow *row, size_t i) {
    size_t bytes;
    char *memory = (char *)rate_memory((size_t)(doctor.machine ? 1024 : 256) << 20, &bytes);
    double seconds[RATE_REPEATS];
    char what[64];
    (void)i;
    doctor.ops->zero(memory, bytes);
    for (size_t k = 0; k < RATE_REPEATS; k++) {
        doctor.ops->finish();
        const double begin = seconds_now();
        doctor.ops->copy(memory + bytes / 2, memory, bytes / 2);
        doctor.ops->finish();
        seconds[k] = seconds_now() - begin;
    }
    doctor.ops->release(memory, bytes);
    snprintf(what, sizeof(what), "reads and writes of %s", human_bytes((double)bytes / 2));
    doctor_rate(row, (double)bytes / median(seconds, RATE_REPEATS), MEMORY_BANDWIDTH,
                doctor.machine ? doctor.machine->value[MEMORY_SHARE] : 1, what);
}

// Measures the link between the device and host memory; i = 1: between the device and a disk
static void look_at_link(DoctorRow *row, size_t i) {
    size_t bytes;
    char *const device = (char *)rate_memory((size_t)(i ? 64 : 256) << 20, &bytes);
    char *const place =
        (char *)(i ? doctor.ops->disk_allocate(doctor.options->disk, bytes) : doctor.ops->host_allocate(bytes));
    if (!place) die("no host memory is left for %s; end other programs that use it", human_bytes((double)bytes));
    const LinkRates rates = link_rates(doctor.ops, place, device, bytes / 2);
    (i ? doctor.ops->disk_release : doctor.ops->host_release)(place, bytes);
    doctor.ops->release(device, bytes);
    // Inputs of Qwen3-8B's layers, at 10^6 tokens.
    const double least = fmin(rates.out, rates.in), inputs = 2.0 * 36 * 4096 * 1e6;
    const Machine *machine = doctor.machine;
    const double expected = machine && !i ? machine->value[LINK_HOST] * machine->value[LINK_SHARE] : 0;
    char text[128], more[128] = "";
    doctor_value(row, least, "byte/s");
    snprintf(text, sizeof(text), "%.3g GB/s %s, %.3g %s, %.3g each way when both are busy", rates.out * 1e-9,
             i ? "written" : "to it", rates.in * 1e-9, i ? "read" : "from it", rates.both * 1e-9);
    if (expected > 0) snprintf(more, sizeof(more), "; %.3g expected of an %s", expected * 1e-9, machine->gpu);
    if (i)
        snprintf(more, sizeof(more), "; the layer inputs of an 8B model at a million tokens, 295 GB, take %.0f min",
                 inputs * (1 / rates.out + 1 / rates.in) / 60);
    doctor_say(row, least < (i ? SLOW_DISK : 0.5 * expected) ? FINDING_NOTE : FINDING_OK, "%s%s", text, more);
}

static void look_at_products(DoctorRow *row, size_t i) {
    size_t bytes;
    Run run;
    void *memory = rate_memory((size_t)400 << 20, &bytes);
    memset(&run, 0, sizeof(run));
    (void)i;
    run.model.dtype = doctor.ops->stored;
    arena_init(run.arena, memory, bytes);
    const double rate = run_peak_flops(&run);
    doctor.ops->release(memory, bytes);
    if (!(rate > 0)) die("no memory is left for two matrices; end other programs that use it");
    doctor_rate(row, rate, PRODUCT_FLOPS, 1, "the best of a few products of random numbers");
}

// Times attention over one document with the model's heads. i: 0 forward, 1 backward; 2, 3: forward, backward with
// global heads. Doubles the document until that takes 20 ms, or up to 8192 tokens.
static void look_at_attention(DoctorRow *row, size_t i) {
    const Config *c = &doctor.config;
    const unsigned form = i < 2 ? FORM_WINDOW : FORM_FULL;
    const size_t NH = c->num_attention_heads, NKV = key_value_heads_of(c, form), HD = head_dim_of(c, form);
    const size_t stored = dtype_size(doctor.ops->stored), summed = dtype_size(doctor.ops->summed), back = i % 2;
    const char *library = doctor.ops->attention_library(NH, NKV, HD, 0, back == 1);
    double seconds[RATE_REPEATS] = {0}, flops = 0;
    size_t T;
    char what[96];
    for (T = min_size(doctor.options->seq_len, 512);; T *= 2) {
        const Span span = {0, 0, T, 0};
        const AttentionShape shape = {{&span, 1, 0, 0}, NH, NKV, HD, 1 / sqrt((double)HD), all_keys, 0, 0, {0, 0}};
        // q, k, v, out, dout, dq, then lse, dk, dv, scratch
        const size_t q = T * NH * HD, kv = T * NKV * HD,
                     own[4] = {T * NH, kv, kv, doctor.ops->attention_scratch(T, NH, NKV, HD, shape.slots)};
        const size_t bytes =
            (4 * q + 2 * kv) * stored + (own[0] + own[1] + own[2] + own[3]) * summed + 16 * ARENA_ALIGNMENT;
        void *memory = doctor.ops->allocate(bytes);
        if (!memory) die("no memory is left for %s; end other programs that use it", human_bytes((double)bytes));
        Arena arena;
        arena_init(&arena, memory, bytes);
        Stored *x[6];
        Summed *sums[4];
        const size_t sizes[6] = {q, kv, kv, q, q, q};
        for (int k = 0; k < 6; k++) {
            x[k] = (Stored *)arena_push(&arena, SHARE_WORKSPACE, "attention", sizes[k], stored);
            fill_random(x[k], doctor.ops->stored, sizes[k], (uint64_t)k);
        }
        for (int k = 0; k < 4; k++) {
            sums[k] = (Summed *)arena_push(&arena, SHARE_WORKSPACE, "attention", own[k], summed);
            doctor.ops->zero(sums[k], own[k] * summed);
        }
        flops = (back ? 5 : 2) * 2 * query_key_pairs(0, T, 0) * (double)(NH * HD);
        doctor.ops->attention_forward(x[3], sums[0], x[0], x[1], x[2], &shape, sums[3]);
        for (int k = -1; k < RATE_REPEATS; k++) { // the first call loads and compiles
            doctor.ops->finish();
            const double begin = seconds_now();
            if (back)
                doctor.ops->attention_backward(x[5], sums[1], sums[2], x[4], x[3], x[0], x[1], x[2], sums[0], &shape,
                                               sums[3]);
            else
                doctor.ops->attention_forward(x[3], sums[0], x[0], x[1], x[2], &shape, sums[3]);
            doctor.ops->finish();
            seconds[k < 0 ? 0 : k] = seconds_now() - begin;
            while (k >= 0 && seconds[0] > 0.05 && k + 1 < RATE_REPEATS)
                k++, seconds[k] = seconds[0]; // a slow call is
                                              // measured once
        }
        doctor.ops->release(memory, bytes);
        if (T >= 8192 || median(seconds, RATE_REPEATS) > 0.02) break;
    }
    snprintf(what, sizeof(what), "%zu tokens, %zu heads of %zu, by %s", T, NH, HD, library ? library : "our own code");
    static const MachineConstant rates[2][2] = {{ATTENTION_FORWARD_FLOPS, ATTENTION_BACKWARD_FLOPS},
                                                {OWN_FORWARD_FLOPS, OWN_BACKWARD_FLOPS}};
    doctor_rate(row, flops / median(seconds, RATE_REPEATS), rates[i > 1 && !library][back], 1, what);
}

// ---- ops -----------------------------------------------------------------------------------------------------------
static void look_at_op(DoctorRow *row, size_t i) {
    check.ops = doctor.ops, check.on_reference = 0;
    check.worst = 0, *check.about = 0, *check.fault = 0, row->op = 1;
    OpShape shape;
    for (size_t k = 0; op_shape(op_cases[i].name, &doctor.config, doctor.options->seq_len, k, &shape); k++)
        op_cases[i].run(&shape);
    check_end();
    doctor_value(row, check.worst, "");
    if (*check.fault)
        doctor_say(row, FINDING_WRONG, "%s: %s; do not train with this build here, and report this line", check.about,
                   check.fault);
    else
        doctor_say(row, FINDING_OK, "%s", check.about);
}

// Checks ops that have kernels for Hopper once more, with the kernels that STREAMBP_WGMMA does not choose.
static void doctor_other_kernels(void) {
    static const char *const ops[] = {"attention_backward", "experts_forward", "experts_activate",
                                      "experts_backward_input"};
    const int on = wgmma_wanted();
    char name[sizeof(((DoctorRow *)0)->name)];
    if (!doctor.hopper) return;
    setenv("STREAMBP_WGMMA", on ? "0" : "1", 1);
    for (size_t i = 0; i < OP_CASES; i++)
        for (size_t k = 0; k < sizeof(ops) / sizeof(*ops); k++) {
            if (strcmp(op_cases[i].name, ops[k]) != 0) continue;
            snprintf(name, sizeof(name), "%s wgmma %s", ops[k], on ? "off" : "on");
            doctor_row(name, look_at_op, i, 0);
        }
    setenv("STREAMBP_WGMMA", on ? "1" : "0", 1);
}

static void look_at_collective(DoctorRow *row, size_t i) {
    static const size_t counts[] = {1, 31, 10007}, units[] = {1, SHARD_ALIGNMENT};
    Collectives c = {doctor.ops, dist_ranks(), dist_rank(), dtype_size(ops_device->summed), NULL, (size_t)32 << 20};
    double found, seconds[3];
    c.x = (char *)ops_device->allocate(2 * c.most);
    if (!c.x) die("no memory is left for %s; end other programs that use it", human_bytes(2.0 * (double)c.most));
    for (size_t k = 0; k < 6; k++) {
        const size_t count = counts[k / 2], bad = collective_check(&c, i, count, units[k % 2], &found);
        if (bad < count && row->finding == FINDING_OK)
            doctor_say(row, FINDING_WRONG,
                       "of %zu elements, in units of %zu, number %zu is %g: do not train over ranks here, and report "
                       "this line",
                       count, units[k % 2], bad, found);
    }
    collective_seconds(&c, i, c.most, 1);
    for (size_t k = 0; k < 3; k++) seconds[k] = collective_seconds(&c, i, c.most, 2);
    ops_device->release(c.x, 2 * c.most);
    const double rate = collective_sent(&c, i, c.most) / median(seconds, 3);
    doctor_value(row, rate, "byte/s");
    if (row->finding == FINDING_OK)
        doctor_say(row, FINDING_OK, "%zu ranks; %.3g GB/s sent by each, of %s", c.ranks, rate * 1e-9,
                   human_bytes((double)c.most));
}

// ---- the verb ------------------------------------------------------------------------------------------------------
static void doctor_begin(const Options *o) {
    pthread_t thread;
    if (o->report && dist_ranks() > 1) die_usage("--report describes one device: start doctor without mpirun");
    doctor.options = o, doctor.text = (o->json || o->report) && is_main_rank() ? stderr : stdout;
    doctor.config = config_from_text(o->init ? o->init : DOCTOR_MODEL, "--init", EXIT_USAGE);
    if (!doctor.ops) doctor.ops = ops_device;
    if (!(doctor.patience > 0)) doctor.patience = 120;
    doctor.bar = progress_begin(stderr, "doctor", 0, 12.0 + OP_CASES); // about this many rows
    pthread_mutex_init(&doctor.lock, NULL);
    if (pthread_create(&thread, NULL, doctor_watch, NULL))
        die("cannot start a thread: %s; raise the limit with ulimit -u", strerror(errno));
    pthread_detach(thread);
}

static int verb_doctor(const Options *o) {
    doctor_begin(o);
    doctor_row("machine", look_at_machine, 0, 0);
    if (dist_ranks() > 1 && strcmp(ops_device->name, "cpu") != 0) doctor_row("connections", look_at_connections, 0, 1);
    doctor_row("plan", look_at_plan, 0, 1);
    if (o->report) doctor_row("pass", look_at_pass, 0, 0);
    doctor_row("copies", look_at_copies, 0, 0);
    doctor_row("host memory link", look_at_link, 0, 0);
    if (o->disk) doctor_row("disk", look_at_link, 1, 0);
    doctor_row("products", look_at_products, 0, 0);
    doctor_row("attention forward", look_at_attention, 0, 0);
    doctor_row("attention backward", look_at_attention, 1, 0);
    if (doctor.config.global_head_dim) doctor_row("global heads forward", look_at_attention, 2, 0);
    if (doctor.config.global_head_dim) doctor_row("global heads backward", look_at_attention, 3, 0);
    for (size_t i = 0; i < OP_CASES; i++) doctor_row(op_cases[i].name, look_at_op, i, 0);
    doctor_other_kernels();
    for (size_t i = 0; i < COLLECTIVES && dist_ranks() > 1; i++)
        doctor_row(collectives[i].name, look_at_collective, i, 1);
    doctor_end();
    return doctor.wrong ? EXIT_RUNTIME : 0;
}

#endif
