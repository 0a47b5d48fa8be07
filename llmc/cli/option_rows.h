/*
The table of options. Everything that depends on what options there are is generated from it by options.h: parsing and
its refusals, --help of the program and of each verb, the echo of a run as a command line, and the JSON in the run log.
To add an option, add a field to struct Options and a row to the table.

A number whose default is a word ("auto", "off") accepts that word too: the field is then 0, or NAN where it is a
double, and means what the help says. A choice is stored as the value of its enum: the row gives those of the first and
the last of its words, which stand in the order of the enum.
*/
#ifndef LLMC_OPTION_ROWS_H
#define LLMC_OPTION_ROWS_H
#include "llmc/data/documents.h"
#include "llmc/plan/machine.h"
#include <assert.h>
#include <stddef.h>
#include <stdint.h>

typedef enum {
    VERB_TRAIN,
    VERB_BP,
    VERB_PLAN,
    VERB_EVAL,
    VERB_LOGPROBS,
    VERB_SAMPLE,
    VERB_CONVERT,
    VERB_INFO,
    VERBS
} Verb;

static const struct {
    const char *name, *purpose, *example;
} verb_rows[VERBS] = {
    {"train", "fine-tune or pre-train; the default verb",
     "--model Qwen3-0.6B --data 'shards/*.bin' --seq-len 8192 --steps 1000 --out run"},
    {"bp", "one forward and backward pass: loss, seconds, peak memory, gradients",
     "--init qwen3-0.6b,num_hidden_layers=2 --seq-len 2048 --json"},
    {"plan", "memory and FLOPs of a run, before anything is allocated",
     "--init qwen3-8b --seq-len 100000 --dtype bf16 --memory-limit 80GiB"},
    {"eval", "loss of a model on data", "--model run/model.bin --data val.bin --seq-len 8192"},
    {"logprobs", "log-probabilities of data under a model, for objectives that have a reference",
     "--model Qwen3-0.6B --data 'pairs/*.bin' --seq-len 8192 --out pairs.logprobs"},
    {"sample", "text from a model", "--model run/model.bin --prompt 'Once upon a time' --max-new-tokens 200"},
    {"convert", "any model that can be read to a Hugging Face folder or a flat .bin",
     "--model run --like Qwen3-0.6B --out Qwen3-0.6B-tuned"},
    {"info", "the configuration and the tensors of a model", "--model Qwen3-0.6B"},
};

typedef struct {
    const char *const *path; // [count], within argv
    size_t count;
} PathList;

typedef struct {
    int32_t *id; // [count]
    size_t count;
} IdList;

// ---- what choices are stored as, in the order of their words; others are declared where they belong ----------------
#define DTYPE_AUTO (-1) // the build's dtype, or the one that the run's other settings ask for

typedef enum { MASTER_AUTO, MASTER_FP32, MASTER_NONE } MasterWeights;
typedef enum { KEYS_AUTO, KEYS_GATHER, KEYS_RING } KeysOfRanks;
typedef enum { SCALE_AUTO, SCALE_GROUP, SCALE_NONE } ScaleRewards;
typedef enum { REWARD_FAILURE_STOP, REWARD_FAILURE_SKIP } RewardFailure;
typedef enum { SCHEDULE_COSINE, SCHEDULE_LINEAR, SCHEDULE_CONSTANT, SCHEDULE_WSD, SCHEDULES } ScheduleKind;
typedef enum { CONVERT_AUTO, CONVERT_FLAT, CONVERT_HF, CONVERT_LLMC } ConvertTo;

// Unset text is NULL.
typedef struct {
    unsigned char given[160]; // [i]: row i stood on the command line
    Verb verb;
    // model
    const char *model, *init;
    int dtype; // a DType, or DTYPE_AUTO
    // data
    PathList data, val_data;
    size_t seq_len, batch, grad_accum;
    Shuffle shuffle;
    LongDocuments long_documents;
    int any_tokenizer;
    // backward pass and its memory
    Method method;
    size_t chunk, logits_chunk;
    int keep;       // attention's outputs
    Keep keep_on;   // KEEP_NOTHING: auto
    int grad_dtype; // a DType, or DTYPE_AUTO
    DType moments;
    MasterWeights master;
    size_t memory_limit;
    Verb plan_for; // train or bp
    // many processes
    size_t zero, sp, ranks;
    double timeout;
    MachineName machine;
    KeysOfRanks kv;
    // objective
    ObjectiveKind objective;
    DpoLoss dpo_loss;
    Normalisation normalisation;
    ScaleRewards scale_rewards;
    double beta, label_smoothing, gamma, clip_low, clip_high; // NAN: auto
    size_t group_size;
    const char *reference_logprobs, *old_logprobs;
    int any_reference;
    // rollout
    int rollout;
    size_t updates, slots;
    IdList stop_ids;
    const char *reward_command;
    RewardFailure reward_failure;
    double reward_timeout;
    // LoRA
    const char *adapter;
    size_t lora_rank;
    double lora_alpha, lora_dropout; // NAN: auto
    const char *lora_targets;
    int rslora, merge;
    // optimization
    size_t steps;
    double lr, final_lr_fraction;
    size_t warmup;
    ScheduleKind schedule;
    double decay_fraction, weight_decay, beta1, beta2, epsilon, grad_clip;
    // a run
    size_t seed, threads;
    const char *out;
    ConvertTo to;
    const char *like;
    size_t max_shard_size;
    int resume;
    size_t save_every, keep_checkpoints, val_every, val_steps, sample_every, repeat;
    int profile;
    int curve;
    size_t curve_tokens;
    // sampling
    const char *prompt, *prompt_file;
    IdList prompt_ids;
    size_t max_new_tokens;
    double temperature;
    size_t top_k;
    double top_p;
    const char *tokenizer, *system;
    int chat, ignore_eos, show_special;
    size_t max_context;
    // output
    int json, quiet;
    const char *grads_out, *grads_of;
    int help, version;
} Options;

// ---- the table -----------------------------------------------------------------------------------------------------
typedef enum {
    OPTION_FLAG,
    OPTION_SIZE,
    OPTION_DOUBLE,
    OPTION_BYTES,
    OPTION_STRING,
    OPTION_CHOICE,
    OPTION_PATHS,
    OPTION_IDS
} OptionKind;

typedef struct {
    const char *name; // without its dashes
    OptionKind kind;
    size_t offset;        // in Options
    const char *fallback; // the default as it would be typed; NULL: unset
    double least, most;   // of numbers, inclusive; of choices, the enum values of the first and the last word
    unsigned verbs;       // bit mask
    const char *value;    // what stands for the value in the help; of a choice, the words allowed
    const char *help;
} OptionRow;

#define ON(verb)         (1u << VERB_##verb)
#define EVERYWHERE       ((1u << VERBS) - 1)
#define RUNS             (ON(TRAIN) | ON(BP) | ON(EVAL) | ON(LOGPROBS) | ON(SAMPLE))
#define READS            (PASSES | ON(EVAL) | ON(LOGPROBS)) // data
#define PASSES           (ON(TRAIN) | ON(BP) | ON(PLAN))
#define AT(field)        offsetof(Options, field)
#define NO_RANGE         0, 0
#define MOST_TOKENS      1073741824.0 // positions are int32
#define OPTION_UNBOUNDED 1e15         // a limit that messages need not mention
#define SECTION(name)                                                                                                  \
    { name, OPTION_FLAG, 0, NULL, NO_RANGE, 0, NULL, NULL }

// A row without verbs is a heading of the help.
static const OptionRow option_rows[] = {
    SECTION("Model"),
    {"model", OPTION_STRING, AT(model), NULL, NO_RANGE, EVERYWHERE, "PATH",
     "a Hugging Face folder (config.json and *.safetensors), a flat .bin, an llm.c GPT-2 .bin, or the folder of a run, "
     "whose last complete checkpoint is taken"},
    {"init", OPTION_STRING, AT(init), NULL, NO_RANGE, EVERYWHERE, "NAME[,key=value,...]",
     "a randomly initialised model instead: a preset (qwen3-0.6b, llama3.1-8b, gpt2, ...) or a family (gpt2, llama, "
     "mistral, qwen2, qwen3, gemma3), its config.json keys overridden"},
    {"dtype", OPTION_CHOICE, AT(dtype), "build", DTYPE_AUTO, DTYPE_FP64, EVERYWHERE, "build|fp32|bf16|double",
     "element type of weights and activations; other than the build's own only for plan and convert"},
    SECTION("Data"),
    {"data", OPTION_PATHS, AT(data), NULL, NO_RANGE, READS, "PATH...",
     "token shards, of data/prepare.py or llm.c, one or more, or a quoted pattern; bp draws random tokens without it, "
     "a plan is of B x T"},
    {"val-data", OPTION_PATHS, AT(val_data), NULL, NO_RANGE, ON(TRAIN) | ON(PLAN), "PATH...", "shards for validation"},
    {"seq-len", OPTION_SIZE, AT(seq_len), "1024", 1, MOST_TOKENS, READS, "T", "tokens of a document, at most"},
    {"batch", OPTION_SIZE, AT(batch), "1", 1, 1048576, READS, "B",
     "documents of a micro-batch; from shards of documents, whole ones are packed into a sequence of B x T tokens"},
    {"grad-accum", OPTION_SIZE, AT(grad_accum), "1", 1, 1048576, PASSES, "N", "micro-batches of a step"},
    {"shuffle", OPTION_CHOICE, AT(shuffle), "auto", SHUFFLE_AUTO, SHUFFLE_OFF, ON(TRAIN) | ON(PLAN), "auto|on|off",
     "a new order every epoch, by --seed, of documents (and what they are packed with), or of llm.c's micro-batches; "
     "auto: of documents only"},
    {"long", OPTION_CHOICE, AT(long_documents), "split", LONG_SPLIT, LONG_REFUSE, READS, "split|truncate|refuse",
     "documents of more than T tokens: split into segments of T that do not see each other, truncate to the first T, "
     "or "
     "refuse with an error"},
    {"any-tokenizer", OPTION_FLAG, AT(any_tokenizer), NULL, NO_RANGE, READS, NULL,
     "accept shards made with another tokenizer than the model's tokenizer.json"},
    SECTION("Backward pass and memory"),
    {"method", OPTION_CHOICE, AT(method), "stream", METHOD_STREAM, METHOD_FULL, PASSES, "stream|checkpoint|full",
     "stream: layer by layer, chunk by chunk (StreamBP); checkpoint: gradient checkpointing; full: keep every "
     "activation"},
    {"chunk", OPTION_SIZE, AT(chunk), "auto", 1, OPTION_UNBOUNDED, READS, "N", "tokens of a chunk"},
    {"logits-chunk", OPTION_SIZE, AT(logits_chunk), "auto", 1, OPTION_UNBOUNDED, READS, "N",
     "tokens whose logits exist at one time"},
    {"keep", OPTION_CHOICE, AT(keep), "none", 0, 1, PASSES, "none|attention",
     "stream, checkpoint: activations saved from forward to backward beside layer inputs; attention: each layer's "
     "attention output and log-sum-exp, so that backward does not run attention forward again"},
    {"keep-on", OPTION_CHOICE, AT(keep_on), "auto", KEEP_NOTHING, KEEP_IN_HOST_MEMORY, PASSES, "auto|device|host",
     "where --keep saves them; auto: on the device if they fit there, else in host memory"},
    {"grad-dtype", OPTION_CHOICE, AT(grad_dtype), "auto", DTYPE_AUTO, DTYPE_BF16, PASSES, "auto|fp32|bf16",
     "type of stored gradients; auto: the model's own, fp32 when accumulating micro-batches"},
    {"moments", OPTION_CHOICE, AT(moments), "fp32", DTYPE_FP32, DTYPE_BF16, ON(TRAIN) | ON(PLAN), "fp32|bf16",
     "type of AdamW's moments"},
    {"master", OPTION_CHOICE, AT(master), "auto", MASTER_AUTO, MASTER_NONE, ON(TRAIN) | ON(PLAN), "auto|fp32|none",
     "a second, fp32 copy of the weights for the optimizer; auto: where the weights are bf16"},
    {"memory-limit", OPTION_BYTES, AT(memory_limit), "none", 1, 9e18, PASSES, "BYTES",
     "limit such as 80GiB: a plan finds the longest T within it, a run that needs more is refused before it starts"},
    {"for", OPTION_CHOICE, AT(plan_for), "train", VERB_TRAIN, VERB_BP, ON(PLAN), "train|bp",
     "plan a training run, or a pass without optimizer"},
    SECTION("Many processes"),
    {"zero", OPTION_SIZE, AT(zero), "0", 0, 3, PASSES | ON(EVAL), "0|1|2|3",
     "ZeRO stage: shard 1 optimizer state, 2 and gradients, 3 and weights over all ranks"},
    {"sp", OPTION_SIZE, AT(sp), "1", 1, 65536, PASSES | ON(EVAL), "S",
     "sequence parallelism: S ranks share a sequence, each with 1/S of its tokens; other ranks take other "
     "micro-batches"},
    {"kv", OPTION_CHOICE, AT(kv), "auto", KEYS_AUTO, KEYS_RING, PASSES | ON(EVAL), "auto|gather|ring",
     "keys and values of a layer, for ranks that share a sequence: all-gather them, or pass blocks around a ring; "
     "auto: "
     "ring where memory does not hold all of them"},
    {"timeout", OPTION_DOUBLE, AT(timeout), "600", 1, 1e6, ON(TRAIN) | ON(BP) | ON(EVAL), "SECONDS",
     "end the job when a rank has given no sign for so long while another waits for it; a rank gives none while it "
     "waits for a file or a reward command"},
    {"ranks", OPTION_SIZE, AT(ranks), "1", 1, 1048576, ON(PLAN), "P", "processes of the run that is planned"},
    {"machine", OPTION_CHOICE, AT(machine), "h100", MACHINE_A100, MACHINE_H200, ON(PLAN) | ON(BP), "a100|h100|h200",
     "plan of several ranks: estimate the time of a step on such nodes; bp --profile: compare ops with its rates"},
    SECTION("Objective"),
    {"objective", OPTION_CHOICE, AT(objective), "sft", OBJECTIVE_SFT, OBJECTIVE_PPO, PASSES | ON(EVAL),
     "sft|dpo|simpo|orpo|grpo|gspo|ppo",
     "sft: cross entropy of the next token; dpo, simpo, orpo: of preference pairs; grpo, gspo: of groups of "
     "completions with rewards; ppo: of tokens with advantages. Of pairs and groups --batch counts as many"},
    {"dpo-loss", OPTION_CHOICE, AT(dpo_loss), "sigmoid", DPO_SIGMOID, DPO_HINGE, PASSES | ON(EVAL), "sigmoid|ipo|hinge",
     "dpo's function of a pair's margin"},
    {"label-smoothing", OPTION_DOUBLE, AT(label_smoothing), "0", 0, 0.499999, PASSES | ON(EVAL), "P",
     "dpo with sigmoid: the probability that a pair is labelled the wrong way round"},
    {"beta", OPTION_DOUBLE, AT(beta), "auto", 0, 1e6, PASSES | ON(EVAL), "X",
     "dpo: strength of the reference (0.1); simpo: scale of the reward (2); orpo: weight of the odds ratio (0.1); "
     "grpo, gspo, ppo: weight of the KL divergence from the reference (0: no reference is needed)"},
    {"gamma", OPTION_DOUBLE, AT(gamma), "auto", 0, 1e6, PASSES | ON(EVAL), "X", "simpo: the margin aimed at (1)"},
    {"normalisation", OPTION_CHOICE, AT(normalisation), "grpo", NORMALISE_GRPO, NORMALISE_DAPO, PASSES | ON(EVAL),
     "grpo|bnpo|dr_grpo|dapo",
     "mean of grpo, gspo and ppo: over a completion's tokens, then over completions (grpo); over all tokens of a step "
     "(bnpo, and dapo, whose upper clip is wider); the sum over completions x --max-new-tokens (dr_grpo)"},
    {"clip-low", OPTION_DOUBLE, AT(clip_low), "auto", 0, 1, PASSES | ON(EVAL), "X",
     "clip the ratio to the old policy below 1 - X (0.2; gspo: 0.0003)"},
    {"clip-high", OPTION_DOUBLE, AT(clip_high), "auto", 0, 1e6, PASSES | ON(EVAL), "X",
     "and above 1 + X (as --clip-low; dapo: 0.28, gspo: 0.0004)"},
    {"group-size", OPTION_SIZE, AT(group_size), "8", 2, 65536, PASSES, "G",
     "completions of a prompt that --rollout writes, and in a plan or a pass over random tokens"},
    {"scale-rewards", OPTION_CHOICE, AT(scale_rewards), "auto", SCALE_AUTO, SCALE_NONE, PASSES | ON(EVAL),
     "auto|group|none",
     "advantages are rewards less their group's mean, over its standard deviation (group) or not (none); auto: none "
     "with dr_grpo, else group"},
    {"reference-logprobs", OPTION_STRING, AT(reference_logprobs), NULL, NO_RANGE, PASSES | ON(EVAL), "FILE",
     "the reference's log-probabilities of --data, by the verb logprobs; without it those of --model are computed "
     "before the first step and kept beside the data, and with LoRA those of the base model as they are needed"},
    {"old-logprobs", OPTION_STRING, AT(old_logprobs), NULL, NO_RANGE, PASSES | ON(EVAL), "FILE",
     "log-probabilities under the policy that wrote the completions; without it those of the policy that is trained, "
     "whose ratio is 1"},
    {"any-reference", OPTION_FLAG, AT(any_reference), NULL, NO_RANGE, PASSES | ON(EVAL), NULL,
     "accept log-probabilities of another model than the one that a run begins with"},
    SECTION("Rollout"),
    {"rollout", OPTION_FLAG, AT(rollout), NULL, NO_RANGE, ON(TRAIN) | ON(PLAN), NULL,
     "grpo, gspo: write the completions: --batch prompts of --data a step, --group-size completions each, by "
     "--temperature, --top-p and --max-new-tokens"},
    {"reward-command", OPTION_STRING, AT(reward_command), NULL, NO_RANGE, ON(TRAIN), "COMMAND",
     "started once by the shell; gets a JSON object {\"prompt\", \"completion\", \"reference\", ...} on a line for "
     "each completion, answers with a number on a line"},
    {"reward-timeout", OPTION_DOUBLE, AT(reward_timeout), "60", 0.01, 1e6, ON(TRAIN), "SECONDS",
     "time limit of the command for the completions of a step"},
    {"reward-failure", OPTION_CHOICE, AT(reward_failure), "stop", REWARD_FAILURE_STOP, REWARD_FAILURE_SKIP, ON(TRAIN),
     "stop|skip", "when it fails: stop the run, or skip the groups without rewards and start it again"},
    {"slots", OPTION_SIZE, AT(slots), "auto", 1, 65536, ON(TRAIN) | ON(PLAN), "N",
     "completions written side by side, each with a key/value cache; auto: all of a step, 64 at most"},
    {"stop-ids", OPTION_IDS, AT(stop_ids), NULL, 0, 2147483647, ON(TRAIN) | ON(PLAN), "ID,ID,...",
     "ids that end a completion, beside the tokenizer's"},
    {"updates", OPTION_SIZE, AT(updates), "1", 1, 1000, ON(TRAIN), "K",
     "optimizer steps on the completions of a rollout"},
    SECTION("LoRA"),
    {"lora-rank", OPTION_SIZE, AT(lora_rank), "off", 0, 65536, PASSES, "R",
     "train adapters of this rank and leave the model as it is"},
    {"lora-alpha", OPTION_DOUBLE, AT(lora_alpha), "auto", 1e-6, 1e6, PASSES, "X",
     "scale adapters by X / R (auto: X = 2R)"},
    {"lora-targets", OPTION_STRING, AT(lora_targets), "all", NO_RANGE, PASSES, "all|NAME,...",
     "linear layers that have adapters, by the ends of their names (q_proj, v_proj); all but the head"},
    {"lora-dropout", OPTION_DOUBLE, AT(lora_dropout), "0", 0, 0.99, PASSES, "P", "dropout rate of an adapter's inputs"},
    {"rslora", OPTION_FLAG, AT(rslora), NULL, NO_RANGE, PASSES, NULL, "scale by X / sqrt(R) instead"},
    {"adapter", OPTION_STRING, AT(adapter), NULL, NO_RANGE,
     ON(TRAIN) | ON(BP) | ON(EVAL) | ON(LOGPROBS) | ON(SAMPLE) | ON(CONVERT), "DIR",
     "adapters in PEFT's format (adapter_config.json, adapter_model.safetensors), or of a run with LoRA: its folder"},
    {"merge", OPTION_FLAG, AT(merge), NULL, NO_RANGE, ON(CONVERT), NULL,
     "add the adapters to the weights that are written"},
    SECTION("Optimization"),
    {"steps", OPTION_SIZE, AT(steps), "epoch", 1, OPTION_UNBOUNDED, ON(TRAIN), "N",
     "optimizer steps; epoch: once through the data"},
    {"lr", OPTION_DOUBLE, AT(lr), "3e-4", 0, 100, ON(TRAIN), "RATE", "peak learning rate of AdamW"},
    {"schedule", OPTION_CHOICE, AT(schedule), "cosine", SCHEDULE_COSINE, SCHEDULE_WSD, ON(TRAIN),
     "cosine|linear|constant|wsd",
     "decay of the learning rate after warm-up; wsd: stay at the peak, then decay over the last steps"},
    {"warmup", OPTION_SIZE, AT(warmup), "0", 0, OPTION_UNBOUNDED, ON(TRAIN), "N", "steps of linear warm-up"},
    {"final-lr-fraction", OPTION_DOUBLE, AT(final_lr_fraction), "0.1", 0, 1, ON(TRAIN), "F",
     "learning rate of the last step over the peak"},
    {"decay-fraction", OPTION_DOUBLE, AT(decay_fraction), "0.2", 0, 1, ON(TRAIN), "F",
     "share of the steps wsd decays in"},
    {"weight-decay", OPTION_DOUBLE, AT(weight_decay), "0.1", 0, 100, ON(TRAIN), "X", "decoupled, on matrices only"},
    {"beta1", OPTION_DOUBLE, AT(beta1), "0.9", 0, 0.999999, ON(TRAIN), "X", "decay of the first moment"},
    {"beta2", OPTION_DOUBLE, AT(beta2), "0.95", 0, 0.999999, ON(TRAIN), "X", "decay of the second moment"},
    {"epsilon", OPTION_DOUBLE, AT(epsilon), "1e-8", 1e-30, 1, ON(TRAIN), "X", "added to the root of the second moment"},
    {"grad-clip", OPTION_DOUBLE, AT(grad_clip), "1", 0, 1e9, ON(TRAIN), "X",
     "clip the norm of the whole gradient to X; 0: no clipping"},
    SECTION("Run"),
    {"out", OPTION_STRING, AT(out), NULL, NO_RANGE, ON(TRAIN) | ON(LOGPROBS) | ON(CONVERT), "PATH",
     "train: the folder of checkpoints and log.jsonl; logprobs: the file to write; convert: the .bin or the new "
     "Hugging Face folder to write"},
    {"to", OPTION_CHOICE, AT(to), "auto", CONVERT_AUTO, CONVERT_LLMC, ON(CONVERT), "auto|flat|hf|llmc",
     "format to write: a flat .bin, a Hugging Face folder or llm.c's GPT-2 .bin; auto: flat where --out ends in .bin"},
    {"like", OPTION_STRING, AT(like), NULL, NO_RANGE, ON(CONVERT), "DIR",
     "Hugging Face folder of the same model, from which config.json, tokenizer and licence are taken"},
    {"max-shard-size", OPTION_BYTES, AT(max_shard_size), "5GB", 1, 9e18, ON(CONVERT), "BYTES",
     "split larger Hugging Face models into files of at most so much"},
    {"resume", OPTION_FLAG, AT(resume), NULL, NO_RANGE, ON(TRAIN), NULL,
     "continue from the last complete checkpoint in --out"},
    {"save-every", OPTION_SIZE, AT(save_every), "off", 0, OPTION_UNBOUNDED, ON(TRAIN), "N",
     "steps from checkpoint to checkpoint; the last step is always saved where there is an --out"},
    {"keep-checkpoints", OPTION_SIZE, AT(keep_checkpoints), "2", 1, OPTION_UNBOUNDED, ON(TRAIN), "N",
     "number of last checkpoints that stay"},
    {"val-every", OPTION_SIZE, AT(val_every), "off", 0, OPTION_UNBOUNDED, ON(TRAIN), "N",
     "steps from validation to validation"},
    {"val-steps", OPTION_SIZE, AT(val_steps), "all", 1, OPTION_UNBOUNDED, ON(TRAIN) | ON(EVAL), "N",
     "micro-batches of an evaluation; all: once through its data"},
    {"curve", OPTION_FLAG, AT(curve), NULL, NO_RANGE, ON(EVAL), NULL,
     "also the loss by position in the document: how far context still helps"},
    {"curve-tokens", OPTION_SIZE, AT(curve_tokens), "powers", 1, MOST_TOKENS, ON(EVAL), "N",
     "positions in a bucket of the curve; powers: 0, 1, 2-3, 4-7 and so on"},
    {"sample-every", OPTION_SIZE, AT(sample_every), "off", 0, OPTION_UNBOUNDED, ON(TRAIN), "N",
     "steps from sample to sample"},
    {"repeat", OPTION_SIZE, AT(repeat), "1", 1, 1000000, ON(BP), "N", "timed passes; their median is reported"},
    {"profile", OPTION_FLAG, AT(profile), NULL, NO_RANGE, ON(BP), NULL,
     "one more pass, in which each op is waited for and timed: where the time goes"},
    {"seed", OPTION_SIZE, AT(seed), "42", 0, 18446744073709551616.0, RUNS | ON(CONVERT) | ON(INFO), "N",
     "seed of --init, the order of the data, random tokens, sampling and stochastic rounding"},
    {"threads", OPTION_SIZE, AT(threads), "auto", 1, 4096, RUNS | ON(PLAN), "N",
     "CPU threads, each with scratch memory of its own; auto: one per core"},
    SECTION("Sampling"),
    {"prompt", OPTION_STRING, AT(prompt), NULL, NO_RANGE, ON(SAMPLE) | ON(TRAIN), "TEXT", "text to continue"},
    {"prompt-file", OPTION_STRING, AT(prompt_file), NULL, NO_RANGE, ON(SAMPLE) | ON(TRAIN), "FILE",
     "text to continue from a file, or from standard input (-)"},
    {"prompt-ids", OPTION_IDS, AT(prompt_ids), NULL, 0, 2147483647, ON(SAMPLE) | ON(TRAIN), "ID,ID,...",
     "token ids to continue"},
    {"max-new-tokens", OPTION_SIZE, AT(max_new_tokens), "256", 1, MOST_TOKENS, ON(SAMPLE) | PASSES | ON(EVAL), "N",
     "tokens to sample, at most; what dr_grpo divides by"},
    {"temperature", OPTION_DOUBLE, AT(temperature), "1", 0, 1000, ON(SAMPLE) | ON(LOGPROBS) | PASSES | ON(EVAL), "X",
     "temperature of sampling (0: always the likeliest token); grpo, gspo, ppo and logprobs divide logits by it, too"},
    {"top-k", OPTION_SIZE, AT(top_k), "off", 0, OPTION_UNBOUNDED, ON(SAMPLE) | ON(TRAIN), "K",
     "sample only from the K likeliest tokens"},
    {"top-p", OPTION_DOUBLE, AT(top_p), "1", 0, 1, ON(SAMPLE) | ON(TRAIN), "P",
     "sample only from the likeliest tokens that together have probability P"},
    {"tokenizer", OPTION_STRING, AT(tokenizer), "auto", NO_RANGE, ON(SAMPLE) | ON(TRAIN), "auto|bytes|none|FILE",
     "a file of data/tokenizer_file.py; bytes: ids are bytes; none: print ids; auto: tokenizer.tok in the model's "
     "folder or the one above it (train: or beside --data), or else bytes where the vocabulary has 256 tokens"},
    {"chat", OPTION_FLAG, AT(chat), NULL, NO_RANGE, ON(SAMPLE) | ON(TRAIN), NULL,
     "the prompt is a user's message, put into the tokenizer's chat template; sample without a prompt reads messages "
     "from standard input, a line each"},
    {"system", OPTION_STRING, AT(system), NULL, NO_RANGE, ON(SAMPLE) | ON(TRAIN), "TEXT",
     "system message of a chat; implies --chat"},
    {"max-context", OPTION_SIZE, AT(max_context), "auto", 2, MOST_TOKENS, ON(SAMPLE), "N",
     "tokens of a chat from standard input, all turns together; auto: those of the model, 8192 at most"},
    {"ignore-eos", OPTION_FLAG, AT(ignore_eos), NULL, NO_RANGE, ON(SAMPLE) | ON(TRAIN), NULL,
     "continue after an end-of-text token"},
    {"show-special", OPTION_FLAG, AT(show_special), NULL, NO_RANGE, ON(SAMPLE) | ON(TRAIN), NULL,
     "print special tokens, too"},
    SECTION("Output"),
    {"json", OPTION_FLAG, AT(json), NULL, NO_RANGE, EVERYWHERE, NULL,
     "one JSON object on stdout; text for people then goes to stderr"},
    {"grads-out", OPTION_STRING, AT(grads_out), NULL, NO_RANGE, ON(BP), "FILE",
     "write every parameter's gradient (.safetensors, fp32, Hugging Face's names and shapes)"},
    {"grads-of", OPTION_STRING, AT(grads_of), NULL, NO_RANGE, ON(BP), "GLOB,GLOB,...",
     "only parameters whose name in that file matches a glob, such as '*.layers.0.*,*norm.weight'"},
    {"quiet", OPTION_FLAG, AT(quiet), NULL, NO_RANGE, EVERYWHERE, NULL, "results only: no header, no progress bar"},
    {"help", OPTION_FLAG, AT(help), NULL, NO_RANGE, EVERYWHERE, NULL, "this text"},
    {"version", OPTION_FLAG, AT(version), NULL, NO_RANGE, EVERYWHERE, NULL, "the version"},
};
#define OPTION_ROWS (sizeof(option_rows) / sizeof(option_rows[0]))
static_assert(OPTION_ROWS <= 160, "Options.given has a place for every row");

// Words that exist in the literature, and are refused by name until they exist here.
static const struct {
    const char *option, *word;
} not_in_this_version[] = {
    {"method", "mst"}, {"method", "seco"}, {"method", "lora"},  {"objective", "kto"},
    {"dtype", "fp16"}, {"dtype", "fp8"},   {"moments", "int8"},
};
#define NOT_IN_THIS_VERSION (sizeof(not_in_this_version) / sizeof(not_in_this_version[0]))

// Options that other programs have, and that are refused by name: objectives here are a weight per token (objective.h).
static const struct {
    const char *option, *reason;
} options_not_in_this_version[] = {
    {"entropy-bonus", "the gradient of an entropy is not a weight per token"},
    {"entropy-coef", "the gradient of an entropy is not a weight per token"},
    {"critic",
     "a critic is a second model, and its loss is not a weight per token; ppo takes advantages with the data"},
    {"value-model",
     "a critic is a second model, and its loss is not a weight per token; ppo takes advantages with the data"},
    {"sft-label-smoothing",
     "targets spread over the vocabulary are not a weight per token; --label-smoothing is of dpo"},
};
#define OPTIONS_NOT_IN_THIS_VERSION (sizeof(options_not_in_this_version) / sizeof(options_not_in_this_version[0]))

// Options that belong to some objectives, as a bit for each, and are refused with the others.
#define OF(kind)       (1u << (kind))
#define OF_GROUPS      (OF(OBJECTIVE_GRPO) | OF(OBJECTIVE_GSPO))
#define OF_POLICY      (OF_GROUPS | OF(OBJECTIVE_PPO))
#define OF_PREFERENCES (OF(OBJECTIVE_DPO) | OF(OBJECTIVE_SIMPO) | OF(OBJECTIVE_ORPO))
static const struct {
    const char *option;
    unsigned objectives;
} of_objectives[] = {
    {"dpo-loss", OF(OBJECTIVE_DPO)},
    {"label-smoothing", OF(OBJECTIVE_DPO)},
    {"beta", OF_PREFERENCES | OF_POLICY},
    {"gamma", OF(OBJECTIVE_SIMPO)},
    {"normalisation", OF_POLICY},
    {"clip-low", OF_POLICY},
    {"clip-high", OF_POLICY},
    {"scale-rewards", OF_GROUPS},
    {"group-size", OF_GROUPS},
    {"reference-logprobs", OF(OBJECTIVE_DPO) | OF_POLICY},
    {"old-logprobs", OF_POLICY},
    {"rollout", OF_GROUPS},
};
#define OF_OBJECTIVES (sizeof(of_objectives) / sizeof(of_objectives[0]))

// Options that have no meaning without another.
static const struct {
    const char *option, *needs;
} of_options[] = {
    {"reward-command", "rollout"}, {"reward-timeout", "rollout"}, {"reward-failure", "rollout"},
    {"updates", "rollout"},        {"lora-alpha", "lora-rank"},   {"lora-targets", "lora-rank"},
    {"lora-dropout", "lora-rank"}, {"rslora", "lora-rank"},       {"slots", "rollout"},
    {"stop-ids", "rollout"},       {"grads-of", "grads-out"},     {"keep-on", "keep"},
};
#define OF_OPTIONS (sizeof(of_options) / sizeof(of_options[0]))

// Values that have no meaning where the model is of this dtype, refused so that nobody believes them to be in force.
static const struct {
    DType dtype;
    const char *option;
    int value;
} without_meaning[] = {
    {DTYPE_FP64, "grad-dtype", DTYPE_FP32}, {DTYPE_FP64, "grad-dtype", DTYPE_BF16}, {DTYPE_FP64, "moments", DTYPE_FP32},
    {DTYPE_FP64, "moments", DTYPE_BF16},    {DTYPE_FP64, "master", MASTER_FP32},    {DTYPE_FP32, "master", MASTER_FP32},
};
#define WITHOUT_MEANING (sizeof(without_meaning) / sizeof(without_meaning[0]))

#undef ON
#undef EVERYWHERE
#undef RUNS
#undef PASSES
#undef AT
#undef NO_RANGE
#undef MOST_TOKENS
#undef SECTION
#endif
