/*
The rows of the table of options (option_rows.h), included wherever something is made of each:

    OPTION(type, field, name, kind, default, least, most, verbs, value, help)    SECTION(heading of the help)

type field is the member of struct Options. A row is written as its kind, which leaves out what all of that kind share:

    FLAG(field, name, verbs, help)                      TEXT(field, name, default, verbs, value, help)
    PATHS, IDS(field, name, verbs, value, help)         INTERVAL(field, name, default, verbs, value, help)
    CHOICE(type, field, name, default, first, last, verbs, words, help)
    SIZE, BYTES, REAL(field, name, default, least, most, verbs, value, help)

A default is written as it would be typed. A number whose default is a word ("auto", "off") accepts that word too: the
field is then 0, or NAN where it is a double, and means what the help says. A row whose most is MOST_TOKENS counts
tokens: 32k is 32768 there, and 32000 of anything else. A choice is stored as the value of its enum: the row gives those
of its first and its last word, which stand in the order of the enum; one of off, on and more may stand without a word,
which means on. An interval counts steps (100) or time (30min).
*/
#define FLAG(field, name, verbs, help)   OPTION(int, field, name, FLAG, NULL, 0, 0, verbs, NULL, help)
#define TEXT(field, name, text, ...)     OPTION(const char *, field, name, TEXT, text, 0, 0, __VA_ARGS__)
#define PATHS(field, name, ...)          OPTION(PathList, field, name, PATHS, NULL, 0, 0, __VA_ARGS__)
#define IDS(field, name, ...)            OPTION(IdList, field, name, IDS, NULL, 0, 2147483647, __VA_ARGS__)
#define SIZE(field, name, ...)           OPTION(size_t, field, name, SIZE, __VA_ARGS__)
#define BYTES(field, name, ...)          OPTION(size_t, field, name, BYTES, __VA_ARGS__)
#define REAL(field, name, ...)           OPTION(double, field, name, REAL, __VA_ARGS__)
#define CHOICE(type, field, name, ...)   OPTION(type, field, name, CHOICE, __VA_ARGS__)
#define INTERVAL(field, name, text, ...) OPTION(Interval, field, name, INTERVAL, text, 0, 0, __VA_ARGS__)
// clang-format off

SECTION("Model")
TEXT(model, "model", NULL, OF_A_MODEL, "PATH",
     "a Hugging Face folder (config.json and *.safetensors) or the name of one in Hugging Face's cache "
     "(Qwen/Qwen3-0.6B), a flat .bin, an llm.c GPT-2 .bin, or the folder of a run, whose last complete checkpoint is "
     "taken, with the base of adapters")
TEXT(init, "init", NULL, EVERYWHERE, "NAME[,key=value,...]",
     "a randomly initialised model instead: a preset (qwen3-0.6b, llama3.1-8b, gpt2, ...) or a family (gpt2, llama, "
     "mistral, ministral3, qwen2, qwen3, gemma3, qwen3_5, smollm3, olmo2, olmo3, phi3, glm4), its config.json keys "
     "overridden; doctor takes the first one unless told")
TEXT(rope_scaling, "rope-scaling", NULL, OF_A_MODEL, "TYPE,factor=X[,key=value,...]",
     "scale rotary positions beyond the model's own by linear, llama3 or yarn, with config.json's keys of that type; "
     "max_position_embeddings grows with them; checkpoints and convert keep it")
SIZE(grow_vocabulary, "grow-vocabulary", "off", 0, 16777216, OF_A_MODEL, "N",
     "add rows for tokens to the embedding and the head until the vocabulary has N ids: each is the mean of the old "
     "rows (transformers draws around it); checkpoints and convert keep them")
CHOICE(int, dtype, "dtype", "build", DTYPE_AUTO, DTYPE_FP64, EVERYWHERE, "build|fp32|bf16|double",
       "element type of weights and activations; other than the build's own only for plan and convert")

CHOICE(BaseWeights, base, "base", "auto", BASE_AUTO, BASE_FP4, RUNS | ON(PLAN) | ON(CONVERT), "auto|none|nf4|fp4",
       "how a frozen model's weights are stored; nf4, fp4: matrices of its layers in 4 bits, as bitsandbytes has them, "
       "with double quantisation; none: in the type of the build; auto: as in its files")
FLAG(quantise_head, "quantise-head", RUNS | ON(PLAN) | ON(CONVERT), "with --base nf4 or fp4: the head's matrix, too")

SECTION("Data")
PATHS(data, "data", READS, "PATH...",
      "token shards, of data/prepare.py or llm.c, one or more, or a quoted pattern; bp draws random tokens without "
      "it, a plan is of B x T")
PATHS(val_data, "val-data", STEPS, "PATH...",
      "shards for validation; with --rollout prompts, whose completions are rewarded")
SIZE(seq_len, "seq-len", "auto", 1, MOST_TOKENS, READS | ON(DOCTOR), "T",
     "tokens of a document, at most; auto: the longest of data/prepare.py's shards, up to the model's positions and "
     "memory allow; else 1024 (llm.c's shards, no --data); doctor: of an op's call")
SIZE(batch, "batch", "1", 1, 1048576, READS, "B",
     "documents of a micro-batch; from shards of documents, whole ones are packed into a sequence of B x T tokens")
SIZE(grad_accum, "grad-accum", "1", 1, 1048576, PASSES, "N", "micro-batches of a step")
SIZE(samples, "samples", "off", 1, OPTION_UNBOUNDED, PASSES, "N",
     "documents, pairs or groups of a step, exactly, in as many micro-batches as they take; the last step of an epoch "
     "has what is left; off: --grad-accum micro-batches, however many they hold")
CHOICE(Shuffle, shuffle, "shuffle", "auto", SHUFFLE_AUTO, SHUFFLE_OFF, STEPS, "auto|on|off",
       "a new order every epoch, by --seed, of documents (and what they are packed with), of --rollout's "
       "prompts, or of llm.c's micro-batches; auto: not of llm.c's")
CHOICE(LongDocuments, long_documents, "long", "split", LONG_SPLIT, LONG_REFUSE, READS, "split|truncate|refuse",
       "documents of more than T tokens: split into segments of T that do not see each other, truncate to the first "
       "T, or refuse with an error")
FLAG(any_tokenizer, "any-tokenizer", READS, "accept shards made with another tokenizer than the model's tokenizer.json")

SECTION("Backward pass and memory")
CHOICE(Method, method, "method", "stream", METHOD_STREAM, METHOD_AUTO, PASSES,
       "stream|checkpoint|full|mst|seco|spaco|auto",
       "stream: layer by layer, chunk by chunk (StreamBP); checkpoint: gradient checkpointing; full: keep every "
       "activation; mst: checkpoint with chunks of MLP and head alone; seco: chunk by chunk, each through all layers; "
       "spaco: seco with a backward for some chunks, unbiased but not exact; auto: stream or seco, what is faster and "
       "fits")
REAL(keep_chunks, "keep-chunks", "1", 1e-6, 1, PASSES, "Q",
     "spaco: the probability of a chunk's backward, which then counts 1/Q times")
SIZE(chunk, "chunk", "auto", 1, MOST_TOKENS, READS, "N",
     "tokens of a chunk; auto: the build's own, the last two share theirs where the last has less than an eighth; mst: "
     "as many chunks as the MLP is wider than the model, and of logits as the vocabulary is")
SIZE(logits_chunk, "logits-chunk", "auto", 1, MOST_TOKENS, READS, "N", "tokens whose logits exist at one time")
CHOICE(KeepActivations, keep, "keep", "none", KEEP_NONE, KEEP_AUTO, PASSES, "none|attention|auto",
       "stream, checkpoint: activations saved from forward to backward beside layer inputs; attention: each layer's "
       "attention output and log-sum-exp, so that backward does not run attention forward again; auto: if that is "
       "faster and fits")
CHOICE(Place, keep_on, "keep-on", "auto", PLACE_AUTO, PLACE_DISK, PASSES, PLACE_WORDS,
       "where --keep saves them; auto, of this and the next options: as fast as what fits allows")
CHOICE(Place, inputs, "inputs", "auto", PLACE_AUTO, PLACE_DISK, PASSES, PLACE_WORDS,
       "where layer inputs are from forward to backward; with seco and spaco keys, values, their gradients and states")
SIZE(inputs_every, "inputs-every", "auto", 1, 65536, PASSES, "K",
     "keep the input of one layer of K, and compute those between again in backward; auto: 1 where that fits")
CHOICE(Place, weights, "weights", "auto", PLACE_AUTO, PLACE_DISK, PASSES, PLACE_WORDS,
       "where weights are; elsewhere than on the device they come to it layer by layer")
CHOICE(Place, gradients, "gradients", "auto", PLACE_AUTO, PLACE_DISK, PASSES, PLACE_WORDS,
       "where stored gradients are")
CHOICE(Place, optimizer, "optimizer", "auto", PLACE_AUTO, PLACE_DISK, STEPS, PLACE_WORDS,
       "where moments and master weights are; elsewhere they come to the device in slices at each step")
CHOICE(int, update, "update", "now", 0, 1, STEPS, "now|forward",
       "forward: weights are stepped in the next forward pass, each layer's before they are used, so that transfers of "
       "the optimizer's state run beside it; results are the same bits")
CHOICE(Place, reference_on, "reference-on", "auto", PLACE_AUTO, PLACE_DISK, STEPS, PLACE_WORDS,
       "kto, and --rollout with --beta above 0, of a whole model: where its weights at the start are, the reference's")
TEXT(disk, "disk", NULL, PASSES | ON(DOCTOR), "DIR",
     "folder on a local disk for what is placed there; its space is taken before the first step and free again at any "
     "end")
CHOICE(Deterministic, deterministic, "deterministic", "on", DETERMINISTIC_ON, DETERMINISTIC_OFF, PASSES, "on|off",
       "off: cuDNN's attention backward takes all keys of a chunk in one call, which is faster and adds in any order: "
       "results differ in the last bits from run to run")
CHOICE(int, grad_dtype, "grad-dtype", "auto", DTYPE_AUTO, DTYPE_BF16, PASSES, "auto|fp32|bf16",
       "type of stored gradients; auto: the model's own, fp32 when accumulating micro-batches")
CHOICE(Moments, moments, "moments", "fp32", MOMENTS_FP32, MOMENTS_INT8, STEPS, "fp32|bf16|int8",
       "type of AdamW's moments; int8: blockwise, as bitsandbytes' AdamW8bit has them, of parameters with fewer than "
       "4096 elements fp32")
CHOICE(MasterWeights, master, "master", "auto", MASTER_AUTO, MASTER_NONE, STEPS, "auto|fp32|none",
       "a second, fp32 copy of the weights for the optimizer; auto: where the weights are bf16")
BYTES(memory_limit, "memory-limit", "none", 1, 9e18, PASSES, "BYTES|CARD",
      "limit such as 40GiB or h100 (what a card leaves to a plan): a plan finds the longest T within it, a run that "
      "needs more is refused before it starts")
BYTES(host_limit, "host-limit", "none", 1, 9e18, PASSES, "BYTES",
      "limit of host memory for what is placed there, of all ranks of a machine together")
BYTES(disk_limit, "disk-limit", "none", 1, 9e18, PASSES, "BYTES", "limit of space in --disk, likewise")
CHOICE(Verb, plan_for, "for", "train", VERB_TRAIN, VERB_BP, ON(PLAN), "train|bp",
       "plan a training run, or a pass without an optimizer update, which needs far less")

SECTION("Many processes")
SIZE(zero, "zero", "0", 0, 3, LOSSES, "0|1|2|3",
     "ZeRO stage: shard 1 optimizer state, 2 and gradients, 3 and weights over all ranks")
SIZE(sp, "sp", "1", 1, 65536, LOSSES, "S",
     "sequence parallelism: S ranks share a sequence, each with 1/S of its tokens; other ranks take other "
     "micro-batches")
CHOICE(KeysOfRanks, kv, "kv", "auto", KEYS_AUTO, KEYS_RING, LOSSES, "auto|gather|ring",
       "keys and values of a layer, for ranks that share a sequence: all-gather them, or pass blocks around a ring; "
       "auto: ring where memory does not hold all of them")
REAL(timeout, "timeout", "600", 1, 1e6, ON(TRAIN) | ON(BP) | ON(EVAL), "SECONDS",
       "end the job when a rank has given no sign for so long while another waits for it; a rank gives none while it "
       "waits for a file or a reward command")
SIZE(ranks, "ranks", "1", 1, 1048576, ON(PLAN), "P", "processes of the run that is planned")
TEXT(machine, "machine", "h100", PASSES, "CARD[,host=BYTES][,disk=BYTES][,disk-rate=BYTES]",
     "plan: the time of a step on such nodes, estimated, whose cards are those of --memory-limit, with so much host "
     "memory and disk; train, bp: its rates decide what lies where; bp: MFU, and --profile against them")

SECTION("Objective")
CHOICE(ObjectiveKind, objective, "objective", "sft", OBJECTIVE_SFT, OBJECTIVE_KTO, LOSSES,
       "sft|dpo|simpo|orpo|grpo|gspo|ppo|cispo|kto",
       "sft: cross entropy of the next token; dpo, simpo, orpo: of preference pairs; grpo, gspo, cispo: of groups of "
       "completions with rewards; ppo: of tokens with advantages; kto: of labelled answers. Of pairs and groups "
       "--batch counts as many")
CHOICE(DpoLoss, dpo_loss, "dpo-loss", "sigmoid", DPO_SIGMOID, DPO_ROBUST, LOSSES,
       "sigmoid|ipo|hinge|robust",
       "dpo's function of a pair's margin")
REAL(label_smoothing, "label-smoothing", "0", 0, 0.499999, LOSSES, "P",
       "dpo with sigmoid or robust: the probability that a pair is labelled the wrong way round")
REAL(beta, "beta", "auto", 0, 1e6, LOSSES, "X",
       "dpo, kto: strength of the reference (0.1); simpo: scale of the reward (2); orpo: weight of the odds ratio "
       "(0.1); with advantages: weight of the KL divergence from the reference (0: no reference is needed)")
CHOICE(KlCorrection, kl_correction, "kl-correction", "auto", KL_CORRECTION_AUTO, KL_CORRECTION_OFF, LOSSES,
       "auto|on|off",
       "with --beta above 0: weight the divergence by the ratio to the old policy, so that its gradient is unbiased; "
       "auto: on, as in TRL since 1.16; a resumed run keeps its own")
REAL(gamma, "gamma", "auto", 0, 1e6, LOSSES, "X", "simpo: the margin aimed at (1)")
CHOICE(Normalisation, normalisation, "normalisation", "grpo", NORMALISE_GRPO, NORMALISE_DAPO, LOSSES,
       "grpo|bnpo|dr_grpo|dapo",
       "mean of grpo, gspo and ppo: over a completion's tokens, then over completions (grpo); over all tokens of a "
       "step (bnpo, and dapo, whose upper clip is wider); the sum over completions x --max-new-tokens (dr_grpo)")
REAL(clip_low, "clip-low", "auto", 0, 1, LOSSES, "X",
       "clip the ratio to the old policy below 1 - X (0.2; gspo: 0.0003; cispo has none)")
REAL(clip_high, "clip-high", "auto", 0, 1e6, LOSSES, "X",
       "and above 1 + X (as --clip-low; dapo: 0.28, gspo: 0.0004); cispo: above X (5)")
CHOICE(KtoLoss, kto_loss, "kto-loss", "kto", KTO_KTO, KTO_APO_ZERO, LOSSES,
       "kto|apo_zero",
       "kto: beside the KL divergence from the reference, estimated from mismatched completions, or beside 0")
REAL(desirable_weight, "desirable-weight", "1", 0, 1e6, LOSSES, "X", "kto: weight of desirable answers in the loss")
REAL(undesirable_weight, "undesirable-weight", "1", 0, 1e6, LOSSES, "X", "and of the others")
SIZE(group_size, "group-size", "8", 2, 65536, PASSES, "G",
     "completions of a prompt that --rollout writes, and in a plan or a pass over random tokens")
CHOICE(ScaleRewards, scale_rewards, "scale-rewards", "auto", SCALE_AUTO, SCALE_NONE, LOSSES,
       "auto|group|none",
       "advantages are rewards less their group's mean, over its standard deviation (group) or not (none); auto: none "
       "with dr_grpo, else group")
TEXT(reference_logprobs, "reference-logprobs", NULL, LOSSES, "FILE",
     "the reference's log-probabilities of --data, by the verb logprobs; without it those of --model (and --adapter) "
     "are computed before the first step and kept beside the data, and with --lora-rank those of the base model as "
     "they are needed")
TEXT(old_logprobs, "old-logprobs", NULL, LOSSES, "FILE",
     "log-probabilities under the policy that wrote the completions; without it those of the policy that is trained, "
     "whose ratio is 1")
FLAG(any_reference, "any-reference", LOSSES,
     "accept log-probabilities of another model than the one that a run begins with")

SECTION("Rollout")
FLAG(rollout, "rollout", STEPS,
     "grpo, gspo: write the completions: --batch prompts of --data a step, --group-size completions each, by "
     "--temperature, --top-p and --max-new-tokens")
PATHS(reward_command, "reward-command", ON(TRAIN), "COMMAND...",
      "one or more, each quoted and started once by the shell; gets a JSON object {\"prompt\", \"completion\", "
      "\"reference\", ...} on a line for each completion, answers with a number, or null, on a line")
TEXT(reward_names, "reward-names", NULL, ON(TRAIN), "NAME,...",
     "what log.jsonl calls their rewards; else by the commands: python3 length.py is length")
TEXT(reward_weights, "reward-weights", NULL, ON(TRAIN), "W,W,...",
     "weights of their rewards in a completion's own, which is the sum; 1 each")
REAL(reward_timeout, "reward-timeout", "60", 0.01, 1e6, ON(TRAIN), "SECONDS",
       "time limit of the command for the completions of a step")
CHOICE(RewardFailure, reward_failure, "reward-failure", "stop", REWARD_FAILURE_STOP, REWARD_FAILURE_SKIP, ON(TRAIN),
       "stop|skip",
       "when one fails: stop the run, or skip the groups without rewards and start it again")
FLAG(mask_truncated, "mask-truncated", STEPS,
     "completions that --max-new-tokens cut off have no weight in the loss; their rewards count in their groups")
SIZE(keep_rollouts, "keep-rollouts", "20", 0, OPTION_UNBOUNDED, ON(TRAIN), "N",
     "steps whose completions and rewards rollouts.jsonl in --out holds, and rollouts.1.jsonl as many before; 0: none")
SIZE(show, "show", "off", 0, OPTION_UNBOUNDED, ON(TRAIN), "N", "completions of a step that are printed, with rewards")
SIZE(slots, "slots", "auto", 1, 65536, STEPS, "N",
     "completions written side by side, each with a key/value cache; auto: all of a step, 64 at most")
IDS(stop_ids, "stop-ids", STEPS, "ID,ID,...", "ids that end a completion, beside the tokenizer's")
FLAG(overlap, "overlap", STEPS,
     "--rollout: write the next completions before a step's update, so that the reward command works meanwhile; they "
     "are off-policy by one, corrected by their old log-probabilities")
SIZE(updates, "updates", "1", 1, 1000, ON(TRAIN), "K", "optimizer steps on the completions of a rollout")

SECTION("LoRA")
SIZE(lora_rank, "lora-rank", "off", 0, 65536, PASSES, "R", "train adapters of this rank and leave the model as it is")
REAL(lora_alpha, "lora-alpha", "auto", 1e-6, 1e6, PASSES, "X", "scale adapters by X / R (auto: X = 2R)")
TEXT(lora_targets, "lora-targets", "all", PASSES, "all|REGEX|NAME,...",
     "linear layers that have adapters, by the ends of their names (q_proj, layers.3.mlp.up_proj) or by a regular "
     "expression for whole names, embed_tokens and lm_head too; all: all but these two")
REAL(lora_dropout, "lora-dropout", "0", 0, 0.99, PASSES, "P", "dropout rate of an adapter's inputs")
FLAG(rslora, "rslora", PASSES, "scale by X / sqrt(R) instead")
TEXT(lora_layers, "lora-layers", NULL, PASSES, "FIRST-LAST,...", "layers that have adapters (0-7,12); all of them")
TEXT(lora_rank_pattern, "lora-rank-pattern", NULL, PASSES, "NAME=R,...",
     "other ranks of some adapters (q_proj=16); names are regular expressions, the first that matches counts")
TEXT(lora_alpha_pattern, "lora-alpha-pattern", NULL, PASSES, "NAME=X,...", "the same of --lora-alpha")
TEXT(lora_modules_to_save, "lora-modules-to-save", NULL, PASSES, "NAME,...",
     "embed_tokens, lm_head: trained as a whole, as copies beside the adapters; not where they are one matrix")
TEXT(adapter, "adapter", NULL, ON(TRAIN) | ON(BP) | ON(EVAL) | ON(LOGPROBS) | ON(SAMPLE) | ON(CONVERT), "DIR",
     "adapters in PEFT's format (adapter_config.json, adapter_model.safetensors), or of a run with LoRA: its folder")
FLAG(merge, "merge", ON(CONVERT), "add the adapters to the weights that are written; --model RUN of adapters does")
FLAG(adapter_only, "adapter-only", ON(CONVERT), "write the adapters alone, as a folder in PEFT's format")

SECTION("Optimization")
SIZE(steps, "steps", "epoch", 1, OPTION_UNBOUNDED, ON(TRAIN), "N", "optimizer steps; epoch: as --epochs says")
REAL(epochs, "epochs", "1", 1e-6, 1e6, ON(TRAIN), "E", "how often to go through the data where --steps is not given")
REAL(lr, "lr", "auto", 0, 100, ON(TRAIN), "RATE",
     "peak learning rate of AdamW; auto: with --init 3e-4; else sft 1e-5, dpo, simpo, orpo and kto 5e-7, grpo, gspo "
     "and ppo 1e-6, of adapters ten times as much; a resumed run keeps its own")
FLAG(any_lr, "any-lr", ON(TRAIN), "accept a --lr above 1")
CHOICE(ScheduleKind, schedule, "schedule", "cosine", SCHEDULE_COSINE, SCHEDULE_WSD, ON(TRAIN),
       "cosine|linear|constant|wsd",
       "decay of the learning rate after warm-up; wsd: stay at the peak, then decay over the last steps")
SIZE(warmup, "warmup", "0", 0, OPTION_UNBOUNDED, ON(TRAIN), "N", "steps of linear warm-up")
REAL(final_lr_fraction, "final-lr-fraction", "0.1", 0, 1, ON(TRAIN), "F",
       "learning rate at the end of the decay, one step after the last, over the peak")
REAL(decay_fraction, "decay-fraction", "0.2", 0, 1, ON(TRAIN), "F", "share of the steps wsd decays in")
REAL(weight_decay, "weight-decay", "0.1", 0, 100, ON(TRAIN), "X", "decoupled, on matrices only")
REAL(beta1, "beta1", "0.9", 0, 0.999999, ON(TRAIN), "X", "decay of the first moment")
REAL(beta2, "beta2", "0.95", 0, 0.999999, ON(TRAIN), "X", "decay of the second moment")
REAL(epsilon, "epsilon", "1e-8", 1e-30, 1, ON(TRAIN), "X", "added to the root of the second moment")
REAL(grad_clip, "grad-clip", "1", 0, 1e9, ON(TRAIN), "X", "clip the norm of the whole gradient to X; 0: no clipping")

SECTION("Run")
TEXT(config, "config", NULL, EVERYWHERE, "FILE",
     "take what the command line leaves out from a file: lines of --option value, a JSON object, or a run's log.jsonl "
     "or folder; options of other verbs in it have no effect")
TEXT(out, "out", NULL, ON(TRAIN) | ON(LOGPROBS) | ON(CONVERT), "PATH",
     "train: the folder of checkpoints and log.jsonl, or none to keep nothing; logprobs: the file to write; convert: "
     "the .bin or the new Hugging Face folder to write")
CHOICE(ConvertTo, to, "to", "auto", CONVERT_AUTO, CONVERT_FP4, ON(CONVERT), "auto|flat|hf|text|llmc|nf4|fp4",
       "format to write: a flat .bin, a Hugging Face folder, one of the text model alone where the model also has "
       "images, llm.c's GPT-2 .bin, or (nf4, fp4) such a folder of matrices in 4 bits as bitsandbytes has them; auto: "
       "flat where --out ends in .bin, else hf")
FLAG(overwrite, "overwrite", ON(TRAIN) | ON(BP) | ON(LOGPROBS) | ON(CONVERT),
     "replace what --out or --grads-out names if it is there (train: the run there, as the new one begins its first "
     "step); what is read is never replaced")
TEXT(like, "like", NULL, ON(CONVERT), "DIR",
     "Hugging Face folder of the same model, from which config.json, tokenizer and licence are taken, and the tensors "
     "of what is not its text model")
BYTES(max_shard_size, "max-shard-size", "5GB", 1, 9e18, ON(CONVERT), "BYTES",
      "split larger Hugging Face models into files of at most so much")
CHOICE(Resume, resume, "resume", "off", RESUME_OFF, RESUME_AUTO, ON(TRAIN), "off|on|auto",
       "continue from the last complete checkpoint in --out; auto: or begin where there is none; on where no word "
       "follows")
FLAG(extend, "extend", ON(TRAIN),
     "with --resume: train a finished run on, up to --steps or --epochs in all, at the rate at which it ended; with "
     "--lr from that rate to this one in --warmup steps, then by --schedule")
INTERVAL(save_every, "save-every", "30min", ON(TRAIN), "N|TIME",
     "from checkpoint to checkpoint: steps, or time such as 30min or 2h; off: only the last step, and what a signal "
     "stops")
SIZE(keep_checkpoints, "keep-checkpoints", "2", 1, OPTION_UNBOUNDED, ON(TRAIN), "N",
     "number of last checkpoints that stay")
FLAG(keep_best, "keep-best", ON(TRAIN),
     "save at the best validation so far, by loss (with --rollout by reward), and keep that beside the last ones")
REAL(grace, "grace", "20", 0, 1e6, ON(TRAIN), "SECONDS",
     "time that SIGINT, SIGTERM, SIGHUP and SIGUSR1 leave to the current step; then it is given up, and the last "
     "finished one is saved")
FLAG(stop_on_divergence, "stop-on-divergence", ON(TRAIN),
     "end the run at a sign of divergence, which is otherwise a note: a gradient of 0 or equal rewards in 3 steps in a "
     "row, a loss (sft) 100 times its best; the last checkpoint before it is kept either way")
SIZE(val_every, "val-every", "off", 0, OPTION_UNBOUNDED, ON(TRAIN), "N", "steps from validation to validation")
SIZE(val_steps, "val-steps", "all", 1, OPTION_UNBOUNDED, ON(TRAIN) | ON(EVAL), "N",
     "micro-batches of an evaluation; all: once through its data")
FLAG(curve, "curve", ON(EVAL), "also the loss by position in the document: how far context still helps")
SIZE(curve_tokens, "curve-tokens", "powers", 1, MOST_TOKENS, ON(EVAL), "N",
     "positions in a bucket of the curve; powers: 0, 1, 2-3, 4-7 and so on")
SIZE(sample_every, "sample-every", "off", 0, OPTION_UNBOUNDED, ON(TRAIN), "N", "steps from sample to sample")
SIZE(repeat, "repeat", "1", 1, 1000000, ON(BP), "N",
     "timed passes; of several the first warms up, and the median of the others is reported")
FLAG(profile, "profile", ON(BP), "one more pass, in which each op is waited for and timed: where the time goes")
SIZE(seed, "seed", "42", 0, 18446744073709551616.0, RUNS | ON(CONVERT) | ON(INFO), "N",
     "seed of --init, the order of the data, random tokens, sampling and stochastic rounding")
SIZE(threads, "threads", "auto", 1, 4096, RUNS | ON(PLAN) | ON(DOCTOR), "N",
     "CPU threads, each with scratch memory of its own; auto: one per core")

SECTION("Sampling")
TEXT(prompt, "prompt", NULL, TEXTS, "TEXT", "text to continue")
TEXT(prompt_file, "prompt-file", NULL, TEXTS, "FILE",
     "text to continue from a file, or from standard input (-)")
IDS(prompt_ids, "prompt-ids", TEXTS, "ID,ID,...", "token ids to continue")
SIZE(max_new_tokens, "max-new-tokens", "256", 1, MOST_TOKENS, LOSSES | ON(SAMPLE), "N",
     "tokens to sample, at most; what dr_grpo divides by")
REAL(temperature, "temperature", "1", 0, 1000, LOSSES | ON(LOGPROBS) | ON(SAMPLE), "X",
       "temperature of sampling (0: always the likeliest token); grpo, gspo, ppo and logprobs divide logits by it, too")
SIZE(top_k, "top-k", "off", 0, OPTION_UNBOUNDED, TEXTS, "K", "sample only from the K likeliest tokens")
REAL(top_p, "top-p", "1", 0, 1, TEXTS, "P",
       "sample only from the likeliest tokens that together have probability P")
TEXT(tokenizer, "tokenizer", "auto", TEXTS, "auto|bytes|none|FILE",
     "a file of data/tokenizer_file.py; bytes: ids are bytes; none: print ids; auto: tokenizer.tok in the model's "
     "folder or the one above it (train: or beside --data), or else bytes where the vocabulary has 256 tokens")
FLAG(chat, "chat", TEXTS,
     "the prompt is a user's message, put into the tokenizer's chat template; sample without a prompt reads messages "
     "from standard input, a line each")
TEXT(system, "system", NULL, TEXTS, "TEXT", "system message of a chat; implies --chat")
CHOICE(Thinking, thinking, "thinking", "auto", THINKING_AUTO, THINKING_OFF, TEXTS, "auto|on|off",
       "whether a chat template that has enable_thinking asks for reasoning before the answer; auto: as it does by "
       "itself")
SIZE(max_context, "max-context", "auto", 2, MOST_TOKENS, ON(SAMPLE), "N",
     "tokens of a chat from standard input, all turns together; auto: those of the model, 8192 at most")
FLAG(ignore_eos, "ignore-eos", TEXTS, "continue after an end-of-text token")
FLAG(show_special, "show-special", TEXTS, "print special tokens, too")

SECTION("Output")
FLAG(json, "json", EVERYWHERE, "one JSON object on stdout; text for people then goes to stderr")
FLAG(json_lines, "json-lines", ON(BP), "with --json: also a line for each pass as it ends, before that object")
TEXT(grads_out, "grads-out", NULL, ON(BP), "FILE",
     "write every parameter's gradient (.safetensors, fp32, Hugging Face's names and shapes)")
TEXT(grads_of, "grads-of", NULL, ON(BP), "GLOB,GLOB,...",
     "only parameters whose name in that file matches a glob, such as '*.layers.0.*,*norm.weight'")
FLAG(quiet, "quiet", EVERYWHERE, "results only: no header, no progress bar")
FLAG(verbose, "verbose", READS, "also the command, the plan by region, and all columns of step lines")
FLAG(help, "help", EVERYWHERE, "this text")
FLAG(version, "version", EVERYWHERE, "the version")


#undef FLAG
#undef TEXT
#undef PATHS
#undef IDS
#undef SIZE
#undef BYTES
#undef REAL
#undef CHOICE
#undef INTERVAL
#undef OPTION
#undef SECTION
