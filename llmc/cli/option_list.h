/*
The rows of the table of options (option_rows.h), included wherever code is made from each row:

    OPTION(type, field, name, kind, default, least, most, verbs, value, help)    SECTION(heading of the help)

`type field` is the member of struct Options. A row is written with its kind's macro, which fills in what rows of the
kind share:

    FLAG(field, name, verbs, help)                      TEXT(field, name, default, verbs, value, help)
    PATHS, IDS(field, name, verbs, value, help)         INTERVAL(field, name, default, verbs, value, help)
    CHOICE(type, field, name, default, first, last, verbs, words, help)
    CHOICE_OF_LAYERS(field, name, default, first, last, verbs, words, help)
    SIZE, BYTES, REAL(field, name, default, least, most, verbs, value, help)

A row whose verbs stand in SHORT(...) is in the short --help of these verbs, with the first part of its help, up to ";
".

A default is written as it would be typed. A number whose default is a word ("auto", "off") also accepts that word: the
field is then 0, or NAN if it is a double. A row whose `most` is MOST_TOKENS counts tokens: 32k is 32768 there, in other
rows 32000. A choice is stored as an enum value: the row gives the values of its first and last word, and its words
follow the enum's order. A choice of off, on and more may be typed without a word, which means on. CHOICE_OF_LAYERS
is a choice whose word a number of layers may follow: products=24. An interval counts steps (100) or time (30min).
*/
#define FLAG(field, name, verbs, help)     OPTION(int, field, name, FLAG, NULL, 0, 0, verbs, NULL, help)
#define TEXT(field, name, text, ...)       OPTION(const char *, field, name, TEXT, text, 0, 0, __VA_ARGS__)
#define PATHS(field, name, ...)            OPTION(PathList, field, name, PATHS, NULL, 0, 0, __VA_ARGS__)
#define IDS(field, name, ...)              OPTION(IdList, field, name, IDS, NULL, 0, 2147483647, __VA_ARGS__)
#define SIZE(field, name, ...)             OPTION(size_t, field, name, SIZE, __VA_ARGS__)
#define BYTES(field, name, ...)            OPTION(size_t, field, name, BYTES, __VA_ARGS__)
#define REAL(field, name, ...)             OPTION(double, field, name, REAL, __VA_ARGS__)
#define CHOICE(type, field, name, ...)     OPTION(type, field, name, CHOICE, __VA_ARGS__)
#define CHOICE_OF_LAYERS(field, name, ...) OPTION(LayersChoice, field, name, LAYERS, __VA_ARGS__)
#define INTERVAL(field, name, text, ...)   OPTION(Interval, field, name, INTERVAL, text, 0, 0, __VA_ARGS__)
// clang-format off

SECTION("Model")
TEXT(model, "model", NULL, SHORT(OF_A_MODEL), "PATH",
     "Hugging Face folder or name in its cache, or a run's folder; a run means its last complete checkpoint, with "
     "the base of its adapters; also a flat .bin, or llm.c's GPT-2 .bin")
CHOICE(Download, download, "download", "ask", DOWNLOAD_ASK, DOWNLOAD_NO, OF_A_MODEL, "ask|yes|no",
       "whether `hf download NAME` may fetch a name of --model, --adapter, --like or of an adapter's base into Hugging "
       "Face's cache; ask: on a terminal, except for plan")
TEXT(init, "init", NULL, SHORT(EVERYWHERE), "NAME[,key=value,...]",
     "a randomly initialised model, such as qwen3-0.6b; info --help lists them, config.json's keys override theirs")
TEXT(rope_scaling, "rope-scaling", NULL, OF_A_MODEL, "TYPE,factor=X[,key=value,...]",
     "extend rotary positions by linear, llama3 or yarn scaling, with config.json's keys of that type; raises "
     "max_position_embeddings; checkpoints and convert keep it")
SIZE(grow_vocabulary, "grow-vocabulary", "off", 0, 16777216, OF_A_MODEL, "N",
     "grow the embedding and the head to N ids, by rows that are the mean of the old rows; checkpoints and convert "
     "keep them")
CHOICE(int, dtype, "dtype", "auto", DTYPE_AUTO, DTYPE_FP64, SHORT(ON(PLAN) | ON(CONVERT)) | EVERYWHERE,
       "auto|fp32|bf16|double",
       "type of weights and activations; auto: bf16 on a GPU, fp32 on the CPU; convert: of the files, auto: the "
       "source's; double needs a build of its own")
CHOICE(Device, device, "device", "auto", DEVICE_AUTO, DEVICE_CUDA, EVERYWHERE & ~(ON(CONVERT) | ON(INFO)),
       "auto|cpu|cuda", "what computes; auto: a GPU if one answers, else the CPU; --resume keeps it")
CHOICE(BaseWeights, base, "base", "auto", BASE_AUTO, BASE_FP8, SHORT(STEPS) | RUNS | ON(CONVERT),
       "auto|none|nf4|fp4|mxfp4|fp8",
       "with LoRA: storage of the frozen weights; nf4, fp4: the layers' matrices in 4 bits, quantised twice as in "
       "bitsandbytes, including experts, never routers; mxfp4: only experts, as in gpt-oss; fp8: e4m3, a scale for a "
       "block of 128 x 128; FP8 folders keep their bytes; none: the type of --dtype; auto: as in the model's files")
FLAG(quantise_head, "quantise-head", RUNS | ON(PLAN) | ON(CONVERT),
     "with --base nf4, fp4 or fp8: also the head's matrix")

SECTION("Data")
PATHS(data, "data", SHORT(READS), "PATH...",
      "token shards of data/prepare.py or llm.c; paths or a quoted pattern; without it bp draws tokens")
PATHS(val_data, "val-data", SHORT(ON(TRAIN)) | STEPS, "PATH...",
      "shards to validate on; with --rollout prompts, whose completions are rewarded")
SIZE(seq_len, "seq-len", "auto", 1, MOST_TOKENS, SHORT(READS | ON(DOCTOR)), "T",
     "most tokens of a document (doctor: of an op's call); auto: the longest in data/prepare.py's shards, within the "
     "model's positions and the memory; 1024 for llm.c's shards and without --data")
SIZE(batch, "batch", "1", 1, 1048576, READS, "B",
     "documents of a micro-batch; documents of data/prepare.py's shards are packed whole into a sequence of B x T "
     "tokens")
SIZE(grad_accum, "grad-accum", "1", 1, 1048576, PASSES, "N", "micro-batches of a step")
SIZE(samples, "samples", "off", 1, OPTION_UNBOUNDED, SHORT(ON(TRAIN)) | PASSES, "N",
     "documents, pairs or groups of a step, over all ranks; in as many micro-batches as needed; an epoch's last "
     "step takes the rest; off: --grad-accum micro-batches, however many documents they hold")
CHOICE(Shuffle, shuffle, "shuffle", "auto", SHUFFLE_AUTO, SHUFFLE_OFF, STEPS, "auto|on|off",
       "a new order every epoch, by --seed, of documents, prompts or llm.c's micro-batches; auto: on, except for "
       "llm.c's shards")
CHOICE(LongDocuments, long_documents, "long", "split", LONG_SPLIT, LONG_REFUSE, READS, "split|truncate|refuse",
       "longer documents: split into segments of T that do not see each other, truncate to T tokens, or refuse")
CHOICE(SharePrefixes, share_prefixes, "share-prefixes", "auto", SHARE_PREFIXES_AUTO, SHARE_PREFIXES_OFF, READS,
       "auto|on|off",
       "compute tokens with which documents begin alike once, with equal results; auto: prompts of pairs, groups and "
       "rollouts; on: also beginnings of plain documents, which then lie in one sequence")
SIZE(shared_tokens, "shared-tokens", "0", 0, MOST_TOKENS, ON(BP) | ON(PLAN), "P",
     "without --data: all documents begin with the same P tokens, which --share-prefixes computes once")
FLAG(any_tokenizer, "any-tokenizer", READS,
     "accept shards made with another tokenizer than the model's tokenizer.json, or of several chat templates")

SECTION("Backward pass and memory")
CHOICE(Method, method, "method", "stream", METHOD_STREAM, METHOD_AUTO, SHORT(ON(BP) | ON(PLAN)) | PASSES,
       "stream|checkpoint|full|mst|seco|spaco|auto",
       "how gradients are computed; stream: layer by layer, chunk by chunk (StreamBP); checkpoint: gradient "
       "checkpointing; full: keep all; mst: checkpoint, with MLP and head alone in chunks; seco: chunk by chunk, each "
       "through all layers; spaco: seco with a backward pass for some chunks only, unbiased but not exact; auto: the "
       "faster one of stream and seco that fits")
REAL(keep_chunks, "keep-chunks", "1", 1e-6, 1, PASSES, "Q",
     "spaco: probability that a chunk has a backward pass, whose gradient is then scaled by 1/Q")
SIZE(chunk, "chunk", "auto", 1, MOST_TOKENS, SHORT(ON(BP)) | READS | ON(SAMPLE), "N",
     "tokens of a chunk; auto: the fastest that fits; the last two share tokens if the last would be below an eighth; "
     "mst: intermediate_size / hidden_size chunks, vocab_size / hidden_size of logits")
SIZE(logits_chunk, "logits-chunk", "auto", 1, MOST_TOKENS, READS | ON(SAMPLE), "N",
     "tokens whose logits exist at the same time")
CHOICE(LatentKeys, latents, "latents", "auto", LATENTS_AUTO, LATENTS_RANGES, READS, "auto|layer|ranges",
       "latent attention: expand a layer's latents to keys and values once, or a range of tokens at a time, again for "
       "each chunk; auto: the faster that fits")
CHOICE_OF_LAYERS(keep, "keep", "auto", KEEP_NONE, KEEP_AUTO, PASSES, "none|attention|products|all|auto",
       "stream, checkpoint: what stays from forward to backward in addition to layer inputs; attention: attention's "
       "outputs; products: outputs of all matrix products; all: backward computes nothing again; products=N: of the "
       "last N layers, of others attention's outputs; auto: the fastest that fits")
CHOICE_OF_LAYERS(keep_on, "keep-on", "auto", PLACE_AUTO, PLACE_DISK, PASSES, PLACE_WORDS,
       "where to store what --keep saves; host=N: of the first N of these layers, of others on the device; auto, here "
       "and below: the fastest place that fits")
CHOICE(Place, inputs, "inputs", "auto", PLACE_AUTO, PLACE_DISK, PASSES, PLACE_WORDS,
       "where layer inputs are stored; seco and spaco: keys, values, their gradients and states")
SIZE(inputs_every, "inputs-every", "auto", 1, 65536, PASSES, "K",
     "store every K-th layer's input, and recompute the inputs between them in backward; auto: 1 if that fits")
CHOICE(Place, weights, "weights", "auto", PLACE_AUTO, PLACE_DISK, PASSES | ON(SAMPLE) | ON(LOGPROBS), PLACE_WORDS,
       "where weights are stored; off the device they are loaded layer by layer")
CHOICE(Place, gradients, "gradients", "auto", PLACE_AUTO, PLACE_DISK, PASSES, PLACE_WORDS, "where gradients are stored")
CHOICE(Place, optimizer, "optimizer", "auto", PLACE_AUTO, PLACE_DISK, STEPS, PLACE_WORDS,
       "where moments and master weights are stored; off the device they are loaded in slices at each step")
CHOICE(WhenUpdated, update, "update", "auto", UPDATE_NOW, UPDATE_AUTO, STEPS, "now|forward|auto",
       "forward: update each layer's weights in the next forward pass, just before their use, so that transfers of the "
       "optimizer's state overlap it; results are the same bits; auto: if that is faster and fits")
CHOICE(Place, reference_on, "reference-on", "auto", PLACE_AUTO, PLACE_DISK, STEPS, PLACE_WORDS,
       "where the reference's weights are stored: for kto, or --rollout with --beta, if all weights are trained")
TEXT(disk, "disk", NULL, SHORT(ON(DOCTOR)) | PASSES | ON(SAMPLE) | ON(LOGPROBS), "DIR",
     "folder on a local disk for tensors placed on disk; its space is reserved until the run ends")
CHOICE(Deterministic, deterministic, "deterministic", "on", DETERMINISTIC_ON, DETERMINISTIC_OFF, PASSES, "on|off",
       "off: cuDNN's attention backward adds in any order: faster, but the last bits differ from run to run")
CHOICE(int, grad_dtype, "grad-dtype", "auto", DTYPE_AUTO, DTYPE_BF16, PASSES, "auto|fp32|bf16",
       "type of stored gradients; auto: the model's own, or fp32 if micro-batches are accumulated")
CHOICE(Moments, moments, "moments", "fp32", MOMENTS_FP32, MOMENTS_INT8, STEPS, "fp32|bf16|int8",
       "type of AdamW's moments; int8: as in bitsandbytes' AdamW8bit (fp32 for parameters below 4096 elements)")
CHOICE(MasterWeights, master, "master", "auto", MASTER_AUTO, MASTER_NONE, STEPS, "auto|fp32|none",
       "fp32 master weights for the optimizer; auto: if the weights are bf16")
BYTES(memory_limit, "memory-limit", "none", 1, 9e18, SHORT(PASSES) | ON(SAMPLE) | ON(LOGPROBS), "BYTES|CARD",
      "device memory for the run, such as 40GiB or h100; a card means the memory that it leaves to a program; plan "
      "finds the longest T within it; a run that needs more is refused before it starts")
BYTES(host_limit, "host-limit", "none", 1, 9e18, PASSES | ON(SAMPLE) | ON(LOGPROBS), "BYTES",
      "limit of host memory for tensors placed there, over all ranks of a machine")
BYTES(disk_limit, "disk-limit", "none", 1, 9e18, PASSES | ON(SAMPLE) | ON(LOGPROBS), "BYTES",
      "limit of space in --disk, over all ranks of a machine")
CHOICE(Verb, plan_for, "for", "train", VERB_TRAIN, VERB_LOGPROBS, SHORT(ON(PLAN)), "train|bp|sample|logprobs",
       "plan a training run, one pass, a text or logprobs; a pass has no optimizer update and needs far less; a text "
       "has --max-context tokens; logprobs has forward passes")

SECTION("Many processes")
SIZE(zero, "zero", "0", 0, 3, SHORT(STEPS) | LOSSES, "0|1|2|3",
     "shard 1: optimizer, 2: also gradients, 3: also weights; over all ranks (ZeRO)")
SIZE(sp, "sp", "1", 1, 65536, SHORT(STEPS) | LOSSES, "S|auto",
     "sequence parallelism: S ranks share a sequence; each has 1/S of its tokens; other ranks take other sequences; "
     "auto: each step deals its sequences to groups of as many ranks as suit their lengths")
CHOICE(KeysOfRanks, kv, "kv", "auto", KEYS_AUTO, KEYS_RING, LOSSES, "auto|gather|ring",
       "how ranks that share a sequence exchange keys and values; auto: gather a layer's keys and values, or ring "
       "if memory lacks room")
REAL(timeout, "timeout", "600", 1, 1e6, ON(TRAIN) | ON(BP) | ON(EVAL), "SECONDS",
       "end the job if a rank gives no sign for this long, for example in a reward command, while another rank "
       "waits for it")
SIZE(ranks, "ranks", "1", 1, 1048576, SHORT(ON(PLAN)), "P", "processes of the planned run")
TEXT(lengths, "lengths", NULL, ON(PLAN), "FILE|lognormal,median=M,sigma=S,max=L",
     "with --sp auto: plan steps of --samples documents of these lengths; a file has one a line, in tokens")
TEXT(machine, "machine", "h100", SHORT(ON(PLAN)) | PASSES, "CARD[xP][,host=BYTES][,disk=BYTES][,disk-rate=BYTES]",
     "also estimate time; plan: of a step on nodes with this card (its memory becomes --memory-limit), host memory "
     "(by default a card's share of a usual node) and disk; h100x8 also means --ranks 8; train, bp: choose places "
     "by the machine's rates; bp: also use them for MFU and --profile")

SECTION("Objective")
CHOICE(ObjectiveKind, objective, "objective", "sft", OBJECTIVE_SFT, OBJECTIVE_DISTILL, SHORT(LOSSES),
       "sft|dpo|simpo|orpo|grpo|gspo|ppo|cispo|kto|distill",
       "what is trained; sft: cross entropy of the next token; dpo, simpo, orpo: preference pairs; grpo, gspo, cispo: "
       "groups of completions with rewards; ppo: tokens with advantages; kto: labelled answers; distill: a teacher's "
       "distribution")
CHOICE(DpoLoss, dpo_loss, "dpo-loss", "sigmoid", DPO_SIGMOID, DPO_ROBUST, LOSSES,
       "sigmoid|ipo|hinge|robust", "dpo: the loss as a function of a pair's margin")
REAL(label_smoothing, "label-smoothing", "0", 0, 0.499999, LOSSES, "P",
       "dpo with sigmoid or robust: probability that a pair's label is reversed")
REAL(beta, "beta", "auto", 0, 1e6, LOSSES, "X",
       "dpo, kto: strength of the reference (0.1); simpo: scale of the reward (2); orpo: weight of the odds ratio "
       "(0.1); grpo, gspo, cispo, ppo: weight of the KL divergence from the reference (0: no reference is needed)")
CHOICE(KlCorrection, kl_correction, "kl-correction", "auto", KL_CORRECTION_AUTO, KL_CORRECTION_OFF, LOSSES,
       "auto|on|off",
       "with --beta above 0: weight the KL divergence by the ratio to the old policy, which makes its gradient "
       "unbiased; auto: on, as in TRL since 1.16; a resumed run keeps its own")
REAL(gamma, "gamma", "auto", 0, 1e6, LOSSES, "X", "simpo: target margin (1)")
CHOICE(Normalisation, normalisation, "normalisation", "grpo", NORMALISE_GRPO, NORMALISE_DAPO, LOSSES,
       "grpo|bnpo|dr_grpo|dapo",
       "how grpo, gspo and ppo average: over a completion's tokens, then over completions (grpo); over all tokens of a "
       "step (bnpo, and dapo, whose upper clip is wider); the sum over completions x --max-new-tokens (dr_grpo)")
REAL(clip_low, "clip-low", "auto", 0, 1, LOSSES, "X",
       "clip the ratio to the old policy below 1 - X (0.2; gspo: 0.0003; cispo has none)")
REAL(clip_high, "clip-high", "auto", 0, 1e6, LOSSES, "X",
       "clip the ratio above 1 + X (default: as --clip-low; dapo: 0.28, gspo: 0.0004); cispo: above X (5)")
CHOICE(KtoLoss, kto_loss, "kto-loss", "kto", KTO_KTO, KTO_APO_ZERO, LOSSES, "kto|apo_zero",
       "kto: compare with the KL divergence from the reference, by mismatched completions; apo_zero: compare with 0")
REAL(desirable_weight, "desirable-weight", "1", 0, 1e6, LOSSES, "X", "kto: weight of desirable answers in the loss")
REAL(undesirable_weight, "undesirable-weight", "1", 0, 1e6, LOSSES, "X", "kto: weight of the other answers")
SIZE(group_size, "group-size", "8", 1, 65536, PASSES, "G",
     "completions that --rollout writes for a prompt; also in a plan or a pass over random tokens")
CHOICE(ScaleRewards, scale_rewards, "scale-rewards", "auto", SCALE_AUTO, SCALE_NONE, LOSSES, "auto|group|none",
       "divide advantages, rewards less their group's mean, by the group's standard deviation; auto: not with dr_grpo")
TEXT(reference_logprobs, "reference-logprobs", NULL, LOSSES, "FILE",
     "the reference's log-probabilities of --data, written by the verb logprobs; without it --model computes them "
     "before the first step and stores them next to the data; with --lora-rank the base model computes them during "
     "training")
TEXT(old_logprobs, "old-logprobs", NULL, LOSSES, "FILE",
     "log-probabilities under the policy that wrote the completions; without it the ratio to that policy is 1")
FLAG(any_reference, "any-reference", LOSSES,
     "accept log-probabilities of another model than the one with which the run begins")
TEXT(teacher_logprobs, "teacher-logprobs", NULL, LOSSES, "FILE",
     "distill: the teacher's likeliest tokens of --data, written by logprobs --top-k")
TEXT(teacher, "teacher", NULL, LOSSES, "PATH",
     "distill: a teacher that runs with the student, a forward pass for each micro-batch; first takes the memory that "
     "it needs; in a plan also a preset")
CHOICE(BaseWeights, teacher_base, "teacher-base", "auto", BASE_AUTO, BASE_FP8, LOSSES, "auto|none|nf4|fp4|mxfp4|fp8",
       "as --base, for --teacher")
CHOICE(Place, teacher_on, "teacher-on", "auto", PLACE_AUTO, PLACE_DISK, LOSSES, PLACE_WORDS,
       "where the weights of --teacher are stored")
CHOICE(DistillLoss, distill_loss, "distill-loss", "forward", DISTILL_FORWARD, DISTILL_REVERSE, LOSSES,
       "forward|reverse",
       "distill; forward: divergence from the teacher over its likeliest tokens and all others as one; reverse: policy "
       "gradient by the target's log-probability under the teacher, for texts that the student wrote")
REAL(distill_weight, "distill-weight", "1", 0, 1, LOSSES, "X",
     "distill, forward: weight of the divergence; cross-entropy of the targets has the rest")
SIZE(teacher_top_k, "teacher-top-k", "64", 1, MOST_TOKENS, LOSSES, "K",
     "distill, forward, without a file: likeliest tokens of the teacher")

SECTION("Rollout")
FLAG(rollout, "rollout", SHORT(ON(TRAIN)) | STEPS,
     "grpo, gspo, cispo, distill: write completions; --group-size for each of --batch prompts of --data a step")
PATHS(reward_command, "reward-command", SHORT(ON(TRAIN)), "COMMAND...",
      "programs that say what a completion is worth; one or more, each quoted; the shell starts each once. It reads a "
      "JSON object {\"prompt\", \"completion\", \"reference\", ...} on a line, and answers with a number or null")
TEXT(reward_names, "reward-names", NULL, ON(TRAIN), "NAME,...",
     "names of the rewards in log.jsonl; by default from the commands: python3 length.py is length")
TEXT(reward_weights, "reward-weights", NULL, ON(TRAIN), "W,W,...",
     "weights of the rewards in a completion's reward, their weighted sum; 1 by default")
REAL(reward_timeout, "reward-timeout", "60", 0.01, 1e6, ON(TRAIN), "SECONDS",
       "time limit of a reward command for the completions of a step")
CHOICE(RewardFailure, reward_failure, "reward-failure", "stop", REWARD_FAILURE_STOP, REWARD_FAILURE_SKIP, ON(TRAIN),
       "stop|skip", "if a reward command fails: stop the run, or skip groups without rewards and restart the command")
TEXT(environment_command, "environment-command", NULL, ON(TRAIN) | ON(PLAN), "COMMAND",
     "a program that answers the model's turns, in place of reward commands; the shell starts it "
     "--environment-workers times. It reads the conversation as a JSON object on a line, and answers with "
     "{\"messages\", \"reward\", \"done\"}")
SIZE(environment_workers, "environment-workers", "1", 1, 64, ON(TRAIN), "N", "processes of --environment-command")
TEXT(render_command, "render-command", "auto", ON(TRAIN) | ON(SAMPLE), "COMMAND",
     "renders what an environment adds, and chats with tools (--serve); auto: python3 data/render.py DATA TOKENIZER, "
     "next to this program; none: no such chats")
SIZE(max_turns, "max-turns", "16", 1, 4096, ON(TRAIN) | ON(PLAN), "N",
     "most turns of the model in a trajectory, of --max-new-tokens each; --seq-len bounds its tokens in all")
CHOICE(TurnRewards, turn_rewards, "turn-rewards", "sum", TURN_REWARDS_SUM, TURN_REWARDS_OWN, ON(TRAIN), "sum|own",
       "train all turns with the sum of a trajectory's rewards, compared with its group's, or each turn with its own, "
       "compared with all turns of the group")
FLAG(mask_truncated, "mask-truncated", STEPS,
     "completions that --max-new-tokens cut off have no weight in the loss; their rewards still count in their groups")
SIZE(keep_rollouts, "keep-rollouts", "20", 0, OPTION_UNBOUNDED, ON(TRAIN), "N",
     "steps that rollouts.jsonl in --out holds; rollouts.1.jsonl holds as many earlier steps; 0: none")
SIZE(show, "show", "off", 0, OPTION_UNBOUNDED, ON(TRAIN), "N", "completions to print for each step, with rewards")
FLAG(overlap, "overlap", STEPS,
     "write the next completions while rewards are computed: one step off-policy, corrected by old log-probabilities")
SIZE(updates, "updates", "1", 1, 1000, ON(TRAIN), "K", "optimizer steps on the completions of one rollout")
FLAG(router_replay, "router-replay", STEPS,
     "experts: train with the routes that wrote a completion, with weights from current logits; without it log.jsonl "
     "has the share of experts that differ, router_differs")

SECTION("LoRA")
SIZE(lora_rank, "lora-rank", "off", 0, 65536, SHORT(PASSES), "R", "train adapters of rank R and freeze the model")
REAL(lora_alpha, "lora-alpha", "auto", 1e-6, 1e6, PASSES, "X", "scale adapters by X / R (auto: X = 2R)")
TEXT(lora_targets, "lora-targets", "auto", PASSES, "all|REGEX|NAME,...",
     "linear layers that get adapters: ends of their names (q_proj, layers.3.mlp.up_proj), or a regular expression "
     "for whole names; embed_tokens and lm_head too; in a model with experts also experts, gate (the router) and "
     "shared_expert.up_proj; all: like PEFT's all-linear; auto: all; in a model with experts only attention's layers")
REAL(lora_dropout, "lora-dropout", "0", 0, 0.99, PASSES, "P", "dropout rate of an adapter's inputs")
FLAG(rslora, "rslora", PASSES, "scale adapters by X / sqrt(R)")
TEXT(lora_layers, "lora-layers", NULL, PASSES, "FIRST-LAST,...", "layers that get adapters (0-7,12); all by default")
TEXT(lora_rank_pattern, "lora-rank-pattern", NULL, PASSES, "NAME=R,...",
     "other ranks for some adapters (q_proj=16); names are regular expressions, the first match counts")
TEXT(lora_alpha_pattern, "lora-alpha-pattern", NULL, PASSES, "NAME=X,...",
     "other values of --lora-alpha for some adapters, in the form of --lora-rank-pattern")
TEXT(lora_modules_to_save, "lora-modules-to-save", NULL, PASSES, "NAME,...",
     "embed_tokens, lm_head: train whole copies of them, stored with the adapters; not if they are one matrix")
TEXT(adapter, "adapter", NULL, SHORT((RUNS | ON(CONVERT)) & ~PASSES) | ON(TRAIN) | ON(BP), "DIR",
     "adapters in PEFT's format, or the folder of a run with LoRA")
FLAG(merge, "merge", SHORT(ON(CONVERT)),
     "add the adapters to the weights that are written; the default for --model RUN of adapters")
FLAG(adapter_only, "adapter-only", SHORT(ON(CONVERT)), "write only the adapters, as a folder in PEFT's format")
CHOICE(AdapterLayout, adapter_layout, "adapter-layout", "peft", ADAPTER_AS_PEFT, ADAPTER_PER_EXPERT, ON(CONVERT),
       "peft|per-expert",
       "with --adapter-only, adapters of experts; peft: as PEFT stores them; per-expert: a tensor for each matrix, "
       "for engines that load experts one by one")

SECTION("Experts")
REAL(router_aux_loss, "router-aux-loss", "auto", 0, 1000, PASSES, "X",
     "coefficient of the loss that balances experts, which is divided by the step's micro-batches and so depends on "
     "how a step is cut into them; auto: router_aux_loss_coef of the model, 0 for simpo and orpo, as in TRL")
REAL(router_z_loss, "router-z-loss", "0", 0, 1000, PASSES, "X",
     "coefficient of the mean square of the routers' log-sum-exp; divided like --router-aux-loss")
REAL(router_bias_update, "router-bias-update", "0", 0, 1, ON(TRAIN), "X",
     "after a step, add X to the bias of experts with fewer rows than the mean, subtract it where they have more; for "
     "routers with a bias (glm4_moe)")

SECTION("Optimization")
SIZE(steps, "steps", "epoch", 1, OPTION_UNBOUNDED, SHORT(ON(TRAIN)), "N",
     "optimizer steps; epoch: as many as --epochs needs")
REAL(epochs, "epochs", "1", 1e-6, 1e6, SHORT(ON(TRAIN)), "E", "passes over the data, unless --steps is given")
REAL(lr, "lr", "auto", 0, 100, SHORT(ON(TRAIN)), "RATE",
     "peak learning rate of AdamW; auto: 3e-4 with --init; else 1e-5 for sft, 5e-7 for dpo, simpo, orpo and kto, 1e-6 "
     "for grpo, gspo, cispo and ppo, ten times as much for adapters; a resumed run keeps its own")
FLAG(any_lr, "any-lr", ON(TRAIN), "accept a --lr above 1")
CHOICE(ScheduleKind, schedule, "schedule", "cosine", SCHEDULE_COSINE, SCHEDULE_WSD, ON(TRAIN),
       "cosine|linear|constant|wsd",
       "decay of the learning rate after warm-up; wsd: stay at the peak, then decay over the last steps")
SIZE(warmup, "warmup", "0", 0, OPTION_UNBOUNDED, SHORT(ON(TRAIN)), "N", "steps of linear warm-up")
REAL(warmup_ratio, "warmup-ratio", "off", 0, 1, ON(TRAIN), "F", "steps of warm-up as a share of all steps, rounded up")
REAL(final_lr_fraction, "final-lr-fraction", "0.1", 0, 1, ON(TRAIN), "F",
       "learning rate at the end of the decay, one step after the last, as a share of the peak")
REAL(decay_fraction, "decay-fraction", "0.2", 0, 1, ON(TRAIN), "F", "wsd: share of the steps that decay")
REAL(weight_decay, "weight-decay", "0.1", 0, 100, ON(TRAIN), "X", "decoupled weight decay, of matrices only")
REAL(beta1, "beta1", "0.9", 0, 0.999999, ON(TRAIN), "X", "decay of the first moment")
REAL(beta2, "beta2", "0.95", 0, 0.999999, ON(TRAIN), "X", "decay of the second moment")
REAL(epsilon, "epsilon", "1e-8", 1e-30, 1, ON(TRAIN), "X", "added to the root of the second moment")
REAL(grad_clip, "grad-clip", "1", 0, 1e9, ON(TRAIN), "X", "clip the norm of the whole gradient to X; 0: no clipping")

SECTION("Run")
TEXT(config, "config", NULL, SHORT(ON(TRAIN)) | EVERYWHERE, "FILE",
     "read options that the command line leaves out from a file; lines of --option value, a JSON object, or a run's "
     "log.jsonl or folder; other verbs' options in it have no effect")
TEXT(out, "out", NULL, SHORT(ON(TRAIN) | ON(LOGPROBS) | ON(CONVERT)), "PATH",
     "folder or file to write; train: folder for checkpoints and log.jsonl, or none; logprobs: file; convert: .bin or "
     "new Hugging Face folder")
CHOICE(ConvertTo, to, "to", "auto", CONVERT_AUTO, CONVERT_FP8, SHORT(ON(CONVERT)),
       "auto|flat|hf|text|llmc|nf4|fp4|mxfp4|fp8",
       "format to write; flat: a flat .bin; hf: a Hugging Face folder; text: a Hugging Face folder without the "
       "parts for images; llmc: llm.c's GPT-2 .bin; nf4, fp4: a Hugging Face folder in 4 bits, experts unchanged; "
       "mxfp4: gpt-oss's format, only experts; fp8: e4m3 as transformers, an FP8 folder as it is; auto: "
       "flat if --out ends in .bin, else hf")
FLAG(overwrite, "overwrite", SHORT(ON(LOGPROBS) | ON(CONVERT)) | ON(TRAIN) | ON(BP),
     "replace an existing --out or --grads-out, never an input; train: the old run stays until the first checkpoint")
TEXT(like, "like", NULL, SHORT(ON(CONVERT)), "DIR",
     "Hugging Face folder or name to copy the tokenizer from; also config.json, licence and tensors outside the text "
     "model")
BYTES(max_shard_size, "max-shard-size", "5GB", 1, 9e18, SHORT(ON(CONVERT)), "BYTES",
      "largest file of a Hugging Face folder; larger models are split")
CHOICE(Resume, resume, "resume", "off", RESUME_OFF, RESUME_AUTO, SHORT(ON(TRAIN)), "off|on|auto",
       "continue from the last checkpoint in --out; auto: skip damaged ones, or begin if there is none; on without a "
       "value")
FLAG(extend, "extend", ON(TRAIN),
     "with --resume: train a finished run on to --steps or --epochs in all, at its final rate; with --lr change to "
     "that rate in --warmup steps, then follow --schedule")
INTERVAL(save_every, "save-every", "30min", SHORT(ON(TRAIN)), "N|TIME",
     "steps (100) or time (30min, 2h) between checkpoints; off: only after the last step, and at a signal")
SIZE(keep_checkpoints, "keep-checkpoints", "2", 1, OPTION_UNBOUNDED, ON(TRAIN), "N", "latest checkpoints to keep")
FLAG(keep_best, "keep-best", ON(TRAIN),
     "keep the checkpoint of the best validation, by loss (with --rollout by reward), in addition to the latest ones")
REAL(grace, "grace", "20", 0, 1e6, ON(TRAIN), "SECONDS",
     "time that a signal leaves to the current step; after it the step is dropped, and the step before it is saved")
FLAG(stop_on_divergence, "stop-on-divergence", ON(TRAIN),
     "end the run, instead of a note, at a gradient of 0 or equal rewards in 3 steps in a row, or a loss (sft) 100 "
     "times its best; the checkpoint before it is kept either way")
SIZE(val_every, "val-every", "off", 0, OPTION_UNBOUNDED, SHORT(ON(TRAIN)), "N", "steps between validations")
SIZE(val_steps, "val-steps", "all", 1, OPTION_UNBOUNDED, SHORT(ON(EVAL)) | ON(TRAIN), "N",
     "micro-batches of an evaluation; all: once through its data")
FLAG(curve, "curve", SHORT(ON(EVAL)), "also print the loss by position; it shows how much context helps")
SIZE(curve_tokens, "curve-tokens", "powers", 1, MOST_TOKENS, ON(EVAL), "N",
     "positions in a bucket of the curve; powers: 0, 1, 2-3, 4-7 and so on")
SIZE(sample_every, "sample-every", "off", 0, OPTION_UNBOUNDED, ON(TRAIN), "N", "steps between samples")
SIZE(repeat, "repeat", "1", 1, 1000000, SHORT(ON(BP)), "N",
     "timed passes; the first of several warms up, the median of the others is reported")
FLAG(profile, "profile", SHORT(ON(BP)), "add a pass that waits for each op: where the time goes")
SIZE(seed, "seed", "42", 0, 18446744073709551616.0, RUNS | ON(CONVERT) | ON(INFO), "N",
     "seed of --init, data order, random tokens, sampling and stochastic rounding")
SIZE(threads, "threads", "auto", 1, 4096, RUNS | ON(PLAN) | ON(DOCTOR), "N",
     "CPU threads, each with its own scratch memory; auto: one per core")

SECTION("Sampling")
TEXT(prompt, "prompt", NULL, SHORT(ON(SAMPLE)) | TEXTS, "TEXT", "text to continue")
TEXT(prompt_file, "prompt-file", NULL, SHORT(ON(SAMPLE)) | TEXTS, "FILE", "file with the prompt; -: standard input")
IDS(prompt_ids, "prompt-ids", TEXTS, "ID,ID,...", "token ids to continue")
SIZE(max_new_tokens, "max-new-tokens", "256", 1, MOST_TOKENS, SHORT(ON(SAMPLE)) | LOSSES, "N",
     "most tokens to sample; dr_grpo divides by it")
REAL(temperature, "temperature", "1", 0, 1000, SHORT(ON(SAMPLE)) | LOSSES | ON(LOGPROBS), "X",
       "temperature of sampling (0: the likeliest token); grpo, gspo, cispo, ppo, distill, logprobs: of logits, too")
SIZE(top_k, "top-k", "off", 0, OPTION_UNBOUNDED, SHORT(ON(SAMPLE)) | TEXTS | SHORT(ON(LOGPROBS)) | ON(PLAN), "K",
     "sample from the K likeliest tokens; logprobs: write these tokens for --objective distill")
SIZE(vocabulary, "vocabulary", "off", 0, MOST_TOKENS, ON(LOGPROBS) | ON(PLAN), "N",
     "with --top-k: leave ids from N on out of the softmax, for students with fewer ids")
REAL(top_p, "top-p", "1", 0, 1, SHORT(ON(SAMPLE)) | TEXTS, "P",
     "sample from the fewest tokens that reach probability P")
TEXT(prompts, "prompts", NULL, SHORT(ON(SAMPLE)), "FILE",
     "prompts, one a line, answered in parallel; a line is a text, or a JSON object with prompt, messages or "
     "prompt_ids; answers are JSON lines in the same order; -: standard input")
TEXT(serve, "serve", NULL, SHORT(ON(SAMPLE)), "[ADDRESS:]PORT",
     "answer chat completions over HTTP; in OpenAI's form, several at a time; ADDRESS: 127.0.0.1, another one needs "
     "--serve-token; PORT 0: any free one, which is printed")
TEXT(serve_token, "serve-token", NULL, ON(SAMPLE), "FILE",
     "file with a token of at least 32 characters, which each request must send as Authorization: Bearer TOKEN")
SIZE(slots, "slots", "auto", 1, 65536, STEPS | ON(SAMPLE), "N",
     "texts of --prompts, --serve or --rollout written in parallel, each with a key/value cache; auto: as many as "
     "memory holds, at most 256, on a CPU 64 unless --max-new-tokens is below 256; with --serve at most 8")
IDS(stop_ids, "stop-ids", STEPS | ON(SAMPLE), "ID,ID,...", "ids that end a text, in addition to the tokenizer's own")
TEXT(tokenizer, "tokenizer", "auto", TEXTS | ON(CONVERT), "auto|bytes|none|FILE",
     "a file of data/tokenizer_file.py, with its chat template; bytes: ids are bytes; none: print ids; auto: "
     "tokenizer.tok next to --data that has the template of the data (train), else in the model's folder or the one "
     "above it, else bytes if the vocabulary has 256 tokens")
FLAG(chat, "chat", SHORT(ON(SAMPLE)) | TEXTS,
     "chat: answer --prompt, or else each line that you type; by the tokenizer's chat template")
TEXT(system, "system", NULL, SHORT(ON(SAMPLE)) | TEXTS, "TEXT", "system message of a chat; implies --chat")
CHOICE(Thinking, thinking, "thinking", "auto", THINKING_AUTO, THINKING_OFF, SHORT(ON(SAMPLE)) | TEXTS,
       "auto|on|off",
       "whether the chat template asks for reasoning; only for templates with enable_thinking; auto: the template's "
       "default")
SIZE(max_context, "max-context", "auto", 2, MOST_TOKENS, ON(SAMPLE) | ON(PLAN), "N",
     "tokens of a chat, all turns together, or of a planned text; auto: the model's positions, at "
     "most 8192; of --prompts: most tokens of a prompt and its answer; auto: the longest prompt and --max-new-tokens")
CHOICE(ContextKind, context_memory, "context-memory", "off", CONTEXT_MEMORY_OFF, CONTEXT_MEMORY_BLOCKS,
       SHORT(ON(SAMPLE)) | ON(PLAN), "off|blocks",
       "allow texts longer than model or device takes (InfLLM); blocks: keep old keys and values in blocks, of "
       "which each chunk of the text loads the best; exact for texts within --context-window")
SIZE(context_window, "context-window", "auto", 256, MOST_TOKENS, ON(SAMPLE) | ON(PLAN), "N",
     "with --context-memory: how many last tokens are always seen, which is also the distance of all other tokens; "
     "auto: half of the model's positions, at most 4096")
SIZE(context_blocks, "context-blocks", "auto", 1, 65536, ON(SAMPLE) | ON(PLAN), "K",
     "with --context-memory: blocks of 128 tokens that a chunk loads; auto: 16, or as many as the model's positions "
     "have room for in addition to the window")
CHOICE(Place, context_on, "context-on", "auto", PLACE_AUTO, PLACE_DISK, ON(SAMPLE) | ON(PLAN), PLACE_WORDS,
       "where --context-memory stores keys and values of blocks")
FLAG(ignore_eos, "ignore-eos", TEXTS, "continue after an end-of-text token")
FLAG(show_special, "show-special", TEXTS, "also print special tokens")

SECTION("Output")
FLAG(json, "json", SHORT(EVERYWHERE), "print one JSON object on stdout; text for people goes to stderr")
FLAG(report, "report", ON(DOCTOR),
     "also measure a pass, and print the machine, rates and that pass as a line to paste; nothing is sent")
FLAG(json_lines, "json-lines", ON(BP), "with --json: also print a line for each pass as it ends, before that object")
TEXT(grads_out, "grads-out", NULL, SHORT(ON(BP)), "FILE",
     "write every parameter's gradient to a .safetensors; fp32, Hugging Face's names and shapes")
TEXT(grads_of, "grads-of", NULL, ON(BP), "GLOB,GLOB,...",
     "only parameters whose name in that file matches a glob, such as '*.layers.0.*,*norm.weight'")
FLAG(quiet, "quiet", EVERYWHERE, "print results only: no header, no progress bar")
SIZE(log_every, "log-every", "auto", 1, OPTION_UNBOUNDED, ON(TRAIN), "N",
     "steps from one printed line to the next; the first and last step have a line; loss and metrics are means "
     "since the previous line, the clock is local time; auto: about 200 lines, or 20 above a terminal's bar; "
     "log.jsonl has every step")
FLAG(verbose, "verbose", SHORT(ON(PLAN) | ON(DOCTOR)) | READS,
     "print more: the plan by region, the command, doctor's ops; also all columns of step lines")
CHOICE(Help, help, "help", NULL, HELP_SHORT, HELP_ALL, SHORT(EVERYWHERE), "short|all",
       "print this text; all: for all options")
FLAG(version, "version", EVERYWHERE, "the version")


#undef FLAG
#undef TEXT
#undef PATHS
#undef IDS
#undef SIZE
#undef BYTES
#undef REAL
#undef CHOICE
#undef CHOICE_OF_LAYERS
#undef INTERVAL
#undef OPTION
#undef SECTION
