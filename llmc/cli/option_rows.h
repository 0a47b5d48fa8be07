/*
The table of options (its rows: option_list.h), and tables of which options need or exclude each other. Parsing,
refusals, --help of the program and of each verb, the echo of a run as a command line and the JSON in its log are
generated from them. A new option is a row of option_list.h.
*/
#ifndef LLMC_OPTION_ROWS_H
#define LLMC_OPTION_ROWS_H
#include "llmc/data/documents.h"
#include "llmc/estimate/machine.h"
#include "llmc/files/hub.h"
#include "llmc/optimizer/schedule.h"
#include "llmc/tokenizer/chat.h"
#include <assert.h>
#include <stddef.h>
#include <stdint.h>

typedef enum {
    VERB_TRAIN,
    VERB_BP,
    VERB_SAMPLE,
    VERB_LOGPROBS,
    VERB_PLAN,
    VERB_EVAL,
    VERB_CONVERT,
    VERB_INFO,
    VERB_DOCTOR,
    VERBS
} Verb;

static const struct {
    const char *name, *purpose, *example;
} verb_rows[VERBS] = {
    {"train", "fine-tune or pre-train; the default verb",
     "--model Qwen3-0.6B --data 'shards/train-*.bin' --seq-len 8192 --out run"},
    {"bp", "one forward and backward pass: loss, seconds, peak memory, gradients",
     "--init qwen3-0.6b,num_hidden_layers=2 --seq-len 2048 --json"},
    {"sample", "text from a model", "--model run --prompt 'Once upon a time' --max-new-tokens 200"},
    {"logprobs", "log-probabilities of data under a model, for objectives that have a reference",
     "--model Qwen3-0.6B --data 'pairs/*.bin' --seq-len 8192 --out pairs.logprobs"},
    {"plan", "memory and FLOPs of a run, before anything is allocated",
     "--init qwen3-8b --seq-len 100000 --machine rtx4090,host=128GiB"},
    {"eval", "loss of a model on data", "--model run --data 'shards/val-*.bin' --seq-len 8192"},
    {"convert", "convert any readable model to a Hugging Face folder or a flat .bin",
     "--model run --like Qwen3-0.6B --out Qwen3-0.6B-tuned"},
    {"info", "show the configuration and the tensors of a model", "--model Qwen3-0.6B"},
    {"doctor", "whether a machine is fit: devices, libraries, rates, every op against a reference",
     "--init qwen3-0.6b --json"},
};

typedef struct {
    const char *const *path; // [count] paths, within argv
    size_t count;
} PathList;

typedef struct {
    int32_t *id; // [count]
    size_t count;
} IdList;

// An interval; off if both fields are 0
typedef struct {
    size_t steps;
    double seconds;
} Interval;

// A choice, and the number of layers that it is for; 0: all
typedef struct {
    int word;
    size_t layers;
} LayersChoice;

// ---- types of choices, in the order of their words; others are declared in their own rooms -------------------------
#define PLACE_WORDS "auto|device|host|disk"
#define DTYPE_AUTO  (-1) // the device's dtype, or the dtype that the run's other settings ask for

typedef enum { DEVICE_AUTO, DEVICE_CPU, DEVICE_CUDA } Device;
typedef enum { MOMENTS_FP32, MOMENTS_BF16, MOMENTS_INT8 } Moments;
typedef enum { MASTER_AUTO, MASTER_FP32, MASTER_NONE } MasterWeights;
typedef enum { BASE_AUTO, BASE_NONE, BASE_NF4, BASE_FP4, BASE_MXFP4, BASE_FP8 } BaseWeights;
typedef enum { KEEP_NONE, KEEP_ATTENTION, KEEP_PRODUCTS, KEEP_ALL, KEEP_AUTO } KeepActivations; // KeepLevel, or auto
typedef enum { UPDATE_NOW, UPDATE_FORWARD, UPDATE_AUTO } WhenUpdated;
typedef enum { LATENTS_AUTO, LATENTS_LAYER, LATENTS_RANGES } LatentKeys;
typedef enum { KEYS_AUTO, KEYS_GATHER, KEYS_RING } KeysOfRanks;
typedef enum { DETERMINISTIC_ON, DETERMINISTIC_OFF } Deterministic;
typedef enum { TURN_REWARDS_SUM, TURN_REWARDS_OWN } TurnRewards;
typedef enum { SHARE_PREFIXES_AUTO, SHARE_PREFIXES_ON, SHARE_PREFIXES_OFF } SharePrefixes;
typedef enum { KL_CORRECTION_AUTO, KL_CORRECTION_ON, KL_CORRECTION_OFF } KlCorrection;
typedef enum { SCALE_AUTO, SCALE_GROUP, SCALE_NONE } ScaleRewards;
typedef enum { CONTEXT_MEMORY_OFF, CONTEXT_MEMORY_BLOCKS } ContextKind;
typedef enum { HELP_NONE, HELP_SHORT, HELP_ALL } Help;
typedef enum { RESUME_OFF, RESUME_ON, RESUME_AUTO } Resume;
typedef enum { REWARD_FAILURE_STOP, REWARD_FAILURE_SKIP } RewardFailure;
typedef enum {
    CONVERT_AUTO,
    CONVERT_FLAT,
    CONVERT_HF,
    CONVERT_TEXT,
    CONVERT_LLMC,
    CONVERT_NF4,
    CONVERT_FP4,
    CONVERT_MXFP4,
    CONVERT_FP8
} ConvertTo;
typedef enum { ADAPTER_AS_PEFT, ADAPTER_PER_EXPERT } AdapterLayout;

// The parsed options. Text that is unset is NULL
typedef struct {
    unsigned char given[192]; // [i]: 1 if row i was given
    short argument[192];      // [i]: index of the last argument that gave row i
    Verb verb;
    int card; // the card that --memory-limit names: 1 + its index in `machines`; 0: it names bytes
#define SECTION(name)
#define OPTION(type, field, ...) type field;
#include "option_list.h"
} Options;

// ---- the table -----------------------------------------------------------------------------------------------------
typedef enum {
    OPTION_FLAG,
    OPTION_SIZE,
    OPTION_REAL,
    OPTION_BYTES,
    OPTION_TEXT,
    OPTION_CHOICE,
    OPTION_LAYERS,
    OPTION_PATHS,
    OPTION_IDS,
    OPTION_INTERVAL
} OptionKind;

typedef struct {
    const char *name; // name without the dashes
    OptionKind kind;
    size_t offset, bytes; // offset and size of the option's field in Options
    const char *fallback; // the default as a user would type it; NULL: unset
    double least, most;   // range of numbers, inclusive; enum values of a choice's first and last word
    unsigned verbs;       // bit mask of verbs; verbs in SHORT(...) also in the upper half
    const char *value;    // placeholder of the value in the help; for a choice the words to choose from
    const char *help;
} OptionRow;

#define ON(verb)         (1u << VERB_##verb)
#define SHORT(verbs)     ((verbs) | (verbs) << 16) // the option is also in the short help of these verbs
#define EVERYWHERE       ((1u << VERBS) - 1)
#define OF_A_MODEL       (EVERYWHERE & ~ON(DOCTOR)) // verbs with a model of the user's
#define RUNS             (ON(TRAIN) | ON(BP) | ON(EVAL) | ON(LOGPROBS) | ON(SAMPLE))
#define READS            (LOSSES | ON(LOGPROBS)) // verbs that read data
#define PASSES           (ON(TRAIN) | ON(BP) | ON(PLAN))
#define STEPS            (ON(TRAIN) | ON(PLAN))
#define LOSSES           (PASSES | ON(EVAL))
#define TEXTS            (ON(TRAIN) | ON(SAMPLE))
#define MOST_TOKENS      1073741824.0 // positions are int32
#define SEQ_LEN_STEP     1024         // step of --seq-len auto
#define OPTION_UNBOUNDED 1e15         // a limit at which messages need not mention it

// The table. A row without verbs is a heading of the help.
static const OptionRow option_rows[] = {
#define SECTION(name)                        {name, OPTION_FLAG, 0, 0, NULL, 0, 0, 0, NULL, NULL},
#define OPTION(type, field, name, kind, ...) {name, OPTION_##kind, offsetof(Options, field), sizeof(type), __VA_ARGS__},
#include "option_list.h"
};
#define OPTION_ROWS (sizeof(option_rows) / sizeof(option_rows[0]))
static_assert(OPTION_ROWS <= 192, "Options.given has a place for every row");

#define PER_DEVICE   "per-device-train-batch-size"
#define ACCUMULATION "gradient-accumulation-steps"
// Names of our options in transformers, TRL and PEFT. also, value: a second option that the name implies, unless that
// option is given. Without `also`, value is the word that the name alone means
static const struct {
    const char *typed, *option, *also, *value;
} option_aliases[] = {
    {"model-name-or-path", "model", NULL, NULL},
    {"output-dir", "out", NULL, NULL},
    {"max-length", "seq-len", "long", "truncate"},
    {"max-seq-length", "seq-len", "long", "truncate"},
    {"learning-rate", "lr", NULL, NULL},
    {"lr-scheduler-type", "schedule", "final-lr-fraction", "0"},
    {"warmup-steps", "warmup", NULL, NULL},
    {"max-steps", "steps", NULL, NULL},
    {"num-train-epochs", "epochs", NULL, NULL},
    {"max-grad-norm", "grad-clip", NULL, NULL},
    {"adam-beta1", "beta1", NULL, NULL},
    {"adam-beta2", "beta2", NULL, NULL},
    {"adam-epsilon", "epsilon", NULL, NULL},
    {"save-steps", "save-every", NULL, NULL},
    {"logging-steps", "log-every", NULL, NULL},
    {"save-total-limit", "keep-checkpoints", NULL, NULL},
    {"eval-steps", "val-every", NULL, NULL},
    {"lora-r", "lora-rank", NULL, NULL},
    {"lora-target-modules", "lora-targets", NULL, NULL},
    {"target-modules", "lora-targets", NULL, NULL},
    {"modules-to-save", "lora-modules-to-save", NULL, NULL},
    {"layers-to-transform", "lora-layers", NULL, NULL},
    {"r", "lora-rank", NULL, NULL},
    {"use-rslora", "rslora", NULL, NULL},
    {PER_DEVICE, "samples", NULL, NULL}, // the product of this option, the next one and the replicas:
                                         // options_add_replicas
    {ACCUMULATION, "grad-accum", NULL, NULL},
    {"num-generations", "group-size", NULL, NULL},
    {"num-iterations", "updates", NULL, NULL},
    {"max-completion-length", "max-new-tokens", NULL, NULL},
    {"epsilon-high", "clip-high", NULL, NULL},
    {"simpo-gamma", "gamma", NULL, NULL},
    {"num-completions-to-print", "show", NULL, NULL},
    {"torch-dtype", "dtype", NULL, NULL},
    {"bf16", "dtype", NULL, "true"},
    {"optim", "moments", NULL, NULL},
    {"rank-pattern", "lora-rank-pattern", NULL, NULL},
    {"alpha-pattern", "lora-alpha-pattern", NULL, NULL},
};
#define OPTION_ALIASES (sizeof(option_aliases) / sizeof(option_aliases[0]))

// Words of other programs for values, also for --bf16 and --optim
static const struct {
    const char *option, *typed, *word;
} word_aliases[] = {
    {"schedule", "constant_with_warmup", "constant"},
    {"dtype", "bfloat16|true", "bf16"},
    {"dtype", "float32|false", "fp32"},
    {"dtype", "build", "auto"}, // logs of earlier versions
    {"moments", "adamw_torch|adamw_torch_fused|paged_adamw_32bit", "fp32"},
    {"moments", "adamw_8bit|adamw_bnb_8bit|paged_adamw_8bit", "int8"},
    {"resume", "true", "on"},
    {"resume", "false", "off"},
};
#define WORD_ALIASES (sizeof(word_aliases) / sizeof(word_aliases[0]))

// Options of other programs (globs) that mean something else here, or nothing. The reason says what to give instead;
// the first row that matches counts. Options whose reason ends in "leave it out" change nothing: they are skipped with
// a note.
static const struct {
    const char *options, *reason;
} options_of_others[] = {
    {"train-batch-size", "give --samples N of a whole step, over all ranks and micro-batches"},
    {"batch-size", "give --samples N of a whole step, or --batch B of a micro-batch"},
    {"per-device-eval-batch-size", "validation takes sequences of --batch x --seq-len tokens; leave it out"},
    {"resume-from-checkpoint", "give --resume and --out with the run's folder, whose last checkpoint is taken"},
    {"logging-*,log-level*,log-on-*", "every step is logged, to log.jsonl in --out; leave it out"},
    {"report-to,project,trackio-*", "scripts/log_export.py makes other formats of log.jsonl in --out; leave it out"},
    {"save-strategy", "give --save-every with a number of steps, or a time"},
    {"eval-strategy,evaluation-strategy,eval-delay,eval-on-start,do-eval", "give --val-data and --val-every N"},
    {"load-best-model-at-end", "give --keep-best: the best checkpoint stays, and its folder is a --model"},
    {"metric-for-best-model,greater-is-better", "--keep-best goes by the loss, with --rollout by the reward"},
    {"push-to-hub,hub-*", "after the run: convert --model RUN --out DIR, then `hf upload NAME DIR`"},
    {"overwrite-output-dir", "give --overwrite, which replaces the run in --out"},
    {"attn-implementation", "attention is always exact and in blocks; leave it out"},
    {"fp16,fp16-full-eval", "fp16 is not in this version; give --dtype bf16"},
    {"tf32", "--dtype fp32 multiplies in fp32, never in tf32; leave it out"},
    {"use-cpu,no-cuda", "give --device cpu"},
    {"gradient-checkpointing*,activation-checkpointing*", "--method stream, the default, needs less; leave it out"},
    {"use-liger-kernel,liger-kernel-config", "logits exist for --logits-chunk tokens at a time; leave it out"},
    {"packing*,padding-free,pad-*,group-by-length", "documents are always packed, whole and apart; leave it out"},
    {"lr-scheduler-kwargs", "give --final-lr-fraction or --decay-fraction"},
    {"deepspeed,fsdp*,parallelism-config,accelerator-config", "--zero 1, 2 or 3 shards a run over mpirun's processes"},
    {"ddp-*,local-rank,average-tokens-across-devices", "the processes of mpirun share each step; leave it out"},
    {"dataset,dataset-*,eval-dataset*,streaming,train-file,validation-file",
     "give --data with shards; data/prepare.py makes them of JSONL, Parquet or text"},
    {"assistant-only-loss,completion-only-loss", "data/prepare.py --train-on assistant or completion does it"},
    {"chat-template-*,eos-token", "data/prepare.py does it: --chat-template, --template-arguments, --eos-token"},
    {"truncation-mode", "--long truncate keeps the first T tokens of a document"},
    {"shuffle-dataset,train-sampling-strategy", "give --shuffle on, off or auto"},
    {"model-revision,revision", "hf download NAME --revision R --local-dir DIR, then --model DIR"},
    {"use-peft", "--lora-rank R trains adapters"},
    {"bias,lora-bias", "biases stay frozen, as by PEFT's default"},
    {"exclude-modules,layers-pattern", "--lora-targets takes a regular expression for whole names"},
    {"load-in-4bit,bnb-4bit-*,use-bnb-nested-quant",
     "--base nf4 stores the weights of a frozen model in 4 bits; folders that are in 4 bits need no option"},
    {"loss-type",
     "give --dpo-loss for dpo, --kto-loss for kto, --normalisation for grpo, gspo, ppo; cispo is an --objective"},
    {"sync-ref-model,ref-model-*", "the reference is the model at the start, or --reference-logprobs FILE"},
    {"use-bias-correction-kl", "give --kl-correction on or off"},
    {"importance-sampling-level", "give --objective gspo for sequence, --objective grpo for token"},
    {"mask-truncated-completions", "give --mask-truncated"},
    {"reward-funcs,reward-model-name-or-path", "--reward-command starts a program that rewards completions"},
    {"max-prompt-length", "prompts are as long as in --data; --seq-len limits prompt and completion together"},
    {"generation-batch-size,steps-per-generation", "--updates K makes K steps on a rollout of --batch prompts"},
    {"environment-factory,max-tool-calling-iterations",
     "--environment-command answers the model's turns, --max-turns limits them"},
    {"use-vllm,vllm-*,use-transformers-*", "--rollout writes completions in this program; leave it out"},
    {"iterative,max-rounds",
     "type: python3 scripts/recipes/inftythink.py rounds QUESTIONS.jsonl ./train sample --model RUN --chat"},
    {"log-completions,log-unique-prompts", "--show N prints completions; rollouts.jsonl in --out has all"},
    {"entropy-*,use-adaptive-entropy",
     "the gradient of an entropy is not a weight per token; it is not in this version"},
    {"critic,value-model", "a critic is a second model and not in this version; ppo takes advantages with the data"},
    {"label-smoothing-factor",
     "targets spread over the vocabulary are not a weight per token; --label-smoothing is dpo's"},
    {"use-dora,use-qalora,use-bdlora,init-lora-weights,*a-config,loftq-config,arrow-config,*target-parameters,"
     "qalora-group-size,layer-replication,alora-invocation-tokens,trainable-token-indices,ensure-weight-tying",
     "this variant of LoRA is not in this version; --lora-rank R and --rslora are"},
    {"neftune-noise-alpha,router-aux-loss-coef,load-in-8bit,min-p,repetition-penalty,generation-kwargs,loss-weights,"
     "f-*divergence-*,ld-alpha,discopop-tau,use-weighting,delta,sapo-*,vespo-*,off-policy-mask-threshold,"
     "top-entropy-quantile,multi-objective-aggregation,max-tool-calling-iterations,optim-*",
     "is not in this version; --help all lists the options that are"},
    {"data-seed", "--seed orders the data, too"},
    {"eval-*,bf16-full-eval,batch-eval-metrics,prediction-loss-only,remove-unused-columns,label-names,include-*,"
     "debug,torch-*,do-*,skip-memory-metrics,use-cache,enable-jit-checkpoint,save-on*,ignore-data-skip,"
     "ignore-bias-buffers,restore-*,dataloader-*,ds3-*,peft-*,cast-*,model-init-kwargs,auto-*,log-multimodal,"
     "log-completions-hub-repo,run-name,transformers-*,inference-mode,fan-in-fan-out,megatron-*,runtime-config,"
     "base-model-name-or-path,length-column-name,trust-remote-code,lora-task-type,task-type,num-generations-eval,"
     "cache-implementation,disable-*,precompute-ref-*,full-determinism,activation-offloading",
     "an option of transformers' trainers that is not needed here; leave it out"},
};
#define OPTIONS_OF_OTHERS (sizeof(options_of_others) / sizeof(options_of_others[0]))

// An option of a pair on the command line overrides the other one from --config.
static const char *const option_rivals[][2] = {{"model", "init"}, {"steps", "epochs"}, {"warmup", "warmup-ratio"}};
#define OPTION_RIVALS (sizeof(option_rivals) / sizeof(option_rivals[0]))

// Options that belong to some objectives, one bit per objective; refused with other objectives
#define OF(kind)       (1u << (kind))
#define OF_CLIPPED     (OF(OBJECTIVE_GRPO) | OF(OBJECTIVE_GSPO) | OF(OBJECTIVE_PPO))
#define OF_GROUPS      (OF(OBJECTIVE_GRPO) | OF(OBJECTIVE_GSPO) | OF(OBJECTIVE_CISPO))
#define OF_POLICY      (OF_GROUPS | OF(OBJECTIVE_PPO))
#define OF_PREFERENCES (OF(OBJECTIVE_DPO) | OF(OBJECTIVE_SIMPO) | OF(OBJECTIVE_ORPO))
static const struct {
    const char *option;
    unsigned objectives;
} of_objectives[] = {
    {"dpo-loss", OF(OBJECTIVE_DPO)},
    {"label-smoothing", OF(OBJECTIVE_DPO)},
    {"kto-loss", OF(OBJECTIVE_KTO)},
    {"desirable-weight", OF(OBJECTIVE_KTO)},
    {"undesirable-weight", OF(OBJECTIVE_KTO)},
    {"beta", OF_PREFERENCES | OF(OBJECTIVE_KTO) | OF_POLICY},
    {"gamma", OF(OBJECTIVE_SIMPO)},
    {"kl-correction", OF_POLICY},
    {"normalisation", OF_CLIPPED},
    {"clip-low", OF_CLIPPED},
    {"clip-high", OF_POLICY},
    {"scale-rewards", OF_GROUPS},
    {"group-size", OF_GROUPS | OF(OBJECTIVE_DISTILL)},
    {"reference-logprobs", OF(OBJECTIVE_DPO) | OF(OBJECTIVE_KTO) | OF_POLICY},
    {"old-logprobs", OF_POLICY},
    {"rollout", OF_GROUPS | OF(OBJECTIVE_DISTILL)},
    {"teacher-logprobs", OF(OBJECTIVE_DISTILL)},
    {"teacher", OF(OBJECTIVE_DISTILL)},
    {"distill-loss", OF(OBJECTIVE_DISTILL)},
    {"distill-weight", OF(OBJECTIVE_DISTILL)},
    {"teacher-top-k", OF(OBJECTIVE_DISTILL)},
};
#define OF_OBJECTIVES (sizeof(of_objectives) / sizeof(of_objectives[0]))

// Options without effect unless another option is given, for verbs that take both
static const struct {
    const char *option, *needs;
} of_options[] = {
    {"reward-command", "rollout"},
    {"reward-timeout", "rollout"},
    {"reward-failure", "rollout"},
    {"updates", "rollout"},
    {"lora-alpha", "lora-rank"},
    {"lora-targets", "lora-rank"},
    {"lora-dropout", "lora-rank"},
    {"rslora", "lora-rank"},
    {"slots", "rollout"},
    {"stop-ids", "rollout"},
    {"grads-of", "grads-out"},
    {"json-lines", "json"},
    {"context-window", "context-memory"},
    {"context-blocks", "context-memory"},
    {"context-on", "context-memory"},
    {"mask-truncated", "rollout"},
    {"environment-command", "rollout"},
    {"environment-workers", "environment-command"},
    {"render-command", "environment-command"},
    {"render-command", "serve"},
    {"serve-token", "serve"},
    {"max-turns", "environment-command"},
    {"turn-rewards", "environment-command"},
    {"reward-names", "rollout"},
    {"reward-weights", "rollout"},
    {"keep-rollouts", "rollout"},
    {"show", "rollout"},
    {"overlap", "rollout"},
    {"router-replay", "rollout"},
    {"extend", "resume"},
    {"lora-layers", "lora-rank"},
    {"lora-modules-to-save", "lora-rank"},
    {"lora-rank-pattern", "lora-rank"},
    {"lora-alpha-pattern", "lora-rank"},
    {"vocabulary", "top-k"},
    {"teacher-base", "teacher"},
    {"teacher-on", "teacher"},
};
#define OF_OPTIONS (sizeof(of_options) / sizeof(of_options[0]))

// Values without effect for a model of this dtype. They are refused, so that nobody believes that they are in force.
static const struct {
    DType dtype;
    const char *option;
    int value;
} without_meaning[] = {
    {DTYPE_FP64, "grad-dtype", DTYPE_FP32}, {DTYPE_FP64, "grad-dtype", DTYPE_BF16},
    {DTYPE_FP64, "moments", MOMENTS_FP32},  {DTYPE_FP64, "moments", MOMENTS_BF16},
    {DTYPE_FP64, "master", MASTER_FP32},    {DTYPE_FP32, "master", MASTER_FP32},
};
#define WITHOUT_MEANING (sizeof(without_meaning) / sizeof(without_meaning[0]))

#endif
