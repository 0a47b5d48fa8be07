#!/bin/sh
# `sample --prompts`: answers in the order of the lines, equal to those of prompts alone; a line's seed; lines as text, chats and ids;
# slots by the memory that is left; every kind of bad line.
. test/cli.sh
TOKENIZERS=$GOLDEN/tokenizers

ids() { sed -n 's/.*"ids": \[\([0-9, ]*\)\], .*"stop".*/\1/p' "$1"; }
six='3 14,15,92,65,35,89 7,9,32,38,46,26,43,38,32,79 7,9,32,38,46,26,43,38,32,79 50,28 84,19,71'
{
    for prompt in $six; do printf '{"prompt_ids": [%s], "id": "a\\n%s"}\n' "$prompt" "${prompt%%,*}"; done
} >"$WORK/six"

# ---- greedy texts are those of prompts alone ------------------------------------------------------------------------------------
for model in qwen3_5 qwen2-sliding gpt2 'qwen3 --base nf4'; do # hybrid, windows, learned positions, 4 bits
    greedy="--model $GOLDEN/$model --temperature 0 --max-new-tokens 6 --quiet"
    for prompt in $six; do
        run sample $greedy --prompt-ids "$prompt" --json
        ids "$WORK/out"
    done >"$WORK/alone"
    for options in '--slots 1' '--slots 3 --chunk 4' ''; do
        succeeds sample $greedy --prompts "$WORK/six" $options
        ids "$WORK/out" >"$WORK/together"
        check "$model $options: texts are those of prompts alone" [ -s "$WORK/alone" -a "$(cat "$WORK/alone")" = "$(cat "$WORK/together")" ]
        check "$model $options: six answers" [ "$(grep -c '^{"prompt_ids": \[[0-9,]*\], "id": "a\\n[0-9]*", "line": [1-6], "ids": ' "$WORK/out")" = 6 ]
        check "$model $options: in order" [ "$(sed 's/.*"line": \([0-9]*\).*/\1/' "$WORK/out" | tr -d '\n')" = 123456 ]
    done
done

# ---- order, seeds, ends ---------------------------------------------------------------------------------------------------------
drawn="--init $TINY --max-new-tokens 40 --seed 9 --stop-ids 5,17,21,40,41,42,43"
succeeds sample $drawn --prompts "$WORK/six" --slots 2
cp "$WORK/out" "$WORK/first"
check 'texts end at --stop-ids, after different lengths' [ "$(grep -c '"eos"' "$WORK/out")" -gt 2 -a "$(ids "$WORK/out" | awk '{print NF}' | sort -u | wc -l)" -gt 2 ]
check 'in order' [ "$(sed 's/.*"line": \([0-9]*\).*/\1/' "$WORK/out" | tr -d '\n')" = 123456 ]
check 'equal prompts, texts of their own' [ "$(sed -n '3s/.*"ids"//p' "$WORK/out")" != "$(sed -n '4s/.*"ids"//p' "$WORK/out")" ]
{ printf '\n\r\n \n'; sed -n 4p "$WORK/six"; } >"$WORK/fourth"
succeeds sample $drawn --prompts "$WORK/fourth"
sed -n 4p "$WORK/first" >"$WORK/wanted"
check 'a text depends on its line alone; blank lines count' cmp -s "$WORK/wanted" "$WORK/out"
"$TRAIN" sample $drawn --prompts - <"$WORK/six" >"$WORK/out" 2>"$WORK/err"
check 'standard input' cmp -s "$WORK/first" "$WORK/out"
for _ in $(seq 4000); do echo '{"prompt_ids": [1]}'; done >"$WORK/many"
"$TRAIN" sample --init $TINY --max-new-tokens 400 --prompts "$WORK/many" --slots 1 >"$WORK/out" 2>"$WORK/err" &
for _ in $(seq 600); do [ ! -s "$WORK/out" ] || break; sleep 0.05; done
check 'an answer is printed as soon as it is complete' [ "$(grep -c '' "$WORK/out")" -lt 4000 -a -s "$WORK/out" ]
kill $! 2>/dev/null
wait $! 2>/dev/null

# ---- text and chats -------------------------------------------------------------------------------------------------------------
chat="--init qwen3,hidden_size=32,intermediate_size=48,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,vocab_size=448
    --tokenizer $TOKENIZERS/qwen3.5.tok --temperature 0 --max-new-tokens 5 --quiet"
cat >"$WORK/chats" <<'END'
Hello "w\orld"
{"prompt": "Hello \"w\\orld\"", "of": {"a": [1, 2]} }
  {"messages": [{"role": "system", "content": "Be kind"}, {"role": "user", "content": "Hello"}]}
{"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHi"}, {"role": "user", "content": "And?"}]}
END
printf '\357\273\277' | cat - "$WORK/chats" >"$WORK/marked"
answers() { sed 's/.*"prompt_ids"/"prompt_ids"/' "$1"; }
succeeds sample $chat --prompts "$WORK/marked" --json
cp "$WORK/out" "$WORK/plain"
check 'other members stand first' grep -q '^{"prompt": "Hello \\"w\\\\orld\\"", "of": {"a": \[1, 2\]} , "line": 2, "prompt_ids"' "$WORK/out"
{
    run sample $chat --prompt 'Hello "w\orld"' --json
    answers "$WORK/out"; answers "$WORK/out"
    run sample $chat --system 'Be kind' --prompt Hello --json
    answers "$WORK/out"
} >"$WORK/wanted"
sed 3q "$WORK/plain" | sed 's/.*"prompt_ids"/"prompt_ids"/' >"$WORK/found"
check 'text, and a chat with a system message, are those of --prompt' cmp -s "$WORK/wanted" "$WORK/found"
printf '<|im_start|>user\nHello<|end|>\n<|im_start|>assistant\nHi<|end|>\n<|im_start|>user\nAnd?<|end|>\n<|im_start|>assistant\n<think>\n' >"$WORK/written"
run sample $chat --prompt-file "$WORK/written" --json
answers "$WORK/out" >"$WORK/wanted"
sed -n 4p "$WORK/plain" | sed 's/.*"prompt_ids"/"prompt_ids"/' >"$WORK/found"
check 'an answer among the messages is as the template keeps it' cmp -s "$WORK/wanted" "$WORK/found"
run sample $chat --chat --thinking off --prompt 'Hello "w\orld"' --json
answers "$WORK/out" >"$WORK/wanted"
succeeds sample $chat --chat --thinking off --prompts "$WORK/chats"
sed -n 1p "$WORK/out" | sed 's/.*"prompt_ids"/"prompt_ids"/' >"$WORK/found"
check 'with --chat a line is a turn' cmp -s "$WORK/wanted" "$WORK/found"

# ---- slots ----------------------------------------------------------------------------------------------------------------------
long="--init $TINY --temperature 0 --max-new-tokens 50 --prompts $WORK/six"
succeeds sample $long
cp "$WORK/out" "$WORK/first"
for slots in 1 2 3; do
    refuses 1 "caches of $slots texts? of up to 59 tokens need .*, but --memory-limit is 9.77 KiB" \
        sample $long --memory-limit 10000B --slots $slots --quiet
    need=$(sed -n 's/.* need \([0-9.]* [KM]iB\).*/\1/p' "$WORK/err" | tr -d ' ')
    succeeds sample $long --memory-limit $need
    says err "^note: memory holds $slots texts\{0,1\} of up to 59 tokens at a time"
    check "$slots slots fit $need, the same texts" cmp -s "$WORK/first" "$WORK/out"
done
succeeds sample $long --weights disk --disk "$WORK" --slots 3
check 'weights on a disk' cmp -s "$WORK/first" "$WORK/out"
make_documents "$WORK/prompts.bin" 96 5,9,3,7 3 0 prompts
planned="plan --init $TINY --data $WORK/prompts.bin --any-tokenizer --rollout --objective grpo --group-size 4 --seq-len 70 --batch 20
    --max-new-tokens 60 --threads 1 --chunk 64 --logits-chunk 64 --keep none"
succeeds $planned --json
check 'a plan has the slots' [ "$(json slots)" = 80 ]
succeeds $planned --json --slots 50
check 'and takes them as given' [ "$(json slots)" = 50 ]
bytes=$(json total_bytes)
succeeds $planned --json --memory-limit ${bytes}B
check "50 fit $bytes bytes" [ "$(json slots) $(json total_bytes) $(json fits)" = "50 $bytes true" ]
says err '^chosen    .*, 50 texts at a time$'

# ---- bad lines: each names the file and the line, before anything is written ---------------------------------------------------------
bad() { # pattern, line, options...
    pattern=$1
    printf '{"prompt_ids": [1]}\n\n%b\n' "$2" >"$WORK/bad"
    shift 2
    refuses 1 "^train: $WORK/bad:3: $pattern" sample --init $TINY --max-new-tokens 4 --prompts "$WORK/bad" "$@"
}
bad 'is not valid JSON; correct the error near byte' '{"prompt": "x"'
bad 'is not valid JSON: byte 12 is not UTF-8' '{"prompt": "\377"}'
bad 'the key "a" is given twice' '{"prompt_ids": [1], "a": 1, "a": 2}'
bad 'has none of "prompt", "messages" and "prompt_ids"; give one' '{"text_": "x"}'
bad 'has more than one of' '{"prompt": "x", "prompt_ids": [1]}'
bad 'the key "stop" is written with each answer; rename' '{"prompt_ids": [1], "stop": 1}'
bad '"prompt" must be a text' '{"prompt": 3}'
bad '"messages" must be a list' '{"messages": "x"}'
bad '"prompt_ids" must be ids below the vocabulary of 96' '{"prompt_ids": [1, 96]}'
bad '"prompt_ids" must be ids below the vocabulary of 96' '{"prompt_ids": [1, -1]}'
bad '"prompt_ids" must be ids below the vocabulary of 96' '{"prompt_ids": ["1"]}'
bad 'the prompt is empty' '{"prompt_ids": []}'
bad 'the model has no tokenizer file, so it reads only ."prompt_ids"' 'Hello'
bad 'messages need the model.s tokenizer file' '{"messages": [{"role": "user", "content": "x"}]}'
bad 'the prompt of 5 tokens and --max-new-tokens 4 take 8 positions, above --max-context 7' '{"prompt_ids": [1,2,3,4,5]}' --max-context 7
init=$(echo $chat | sed 's/--init //; s/ .*//')
read_with() { # tokenizer, pattern, line, options...
    tokenizer=$1 pattern=$2
    printf '\n%b\n' "$3" >"$WORK/bad"
    shift 3
    refuses 1 "^train: $WORK/bad:2: $pattern" sample --init $init --tokenizer $TOKENIZERS/$tokenizer.tok --prompts "$WORK/bad" "$@"
}
user='{"role": "user", "content": "x"}'
read_with qwen3.5 'byte 1 is not UTF-8' 'a\377'
read_with qwen3.5 'the prompt is empty' '{"prompt": ""}'
read_with qwen3.5 'message 1 must be' '{"messages": [{"role": "tool", "content": "x"}]}'
read_with qwen3.5 'message 2 must be' "{\"messages\": [$user, {\"role\": \"assistant\", \"content\": null}]}"
read_with qwen3.5 'message 2 is the user.s; .* take turns' "{\"messages\": [$user, $user]}"
read_with qwen3.5 'message 2 is the system.s; .* take turns' "{\"messages\": [$user, {\"role\": \"system\", \"content\": \"x\"}]}"
read_with qwen3.5 'the messages must end with the user.s' "{\"messages\": [$user, {\"role\": \"assistant\", \"content\": \"x\"}]}"
read_with qwen3.5 'the messages must end with the user.s' '{"messages": []}'
read_with qwen2 'message 2 begins or ends with white space' \
    "{\"messages\": [$user, {\"role\": \"assistant\", \"content\": \"x \"}, $user]}"
init=${TINY%96}760
read_with gemma '.*gemma.tok: no system text' "{\"messages\": [{\"role\": \"system\", \"content\": \"x\"}, $user]}"
init=gpt2,n_embd=32,n_layer=1,n_head=4,n_positions=16,vocab_size=96
printf '{"prompt_ids": [1,2,3]}\n{"prompt_ids": [1,2,3,4,5]}\n' >"$WORK/bad"
refuses 1 "^train: $WORK/bad:2: the prompt of 5 tokens and --max-new-tokens 13 take 17 positions, above the model.s positions, 16" \
    sample --init $init --max-new-tokens 13 --prompts "$WORK/bad"
printf "\n \n" >"$WORK/bad"
refuses 1 "^train: $WORK/bad: has no prompts" sample --init $TINY --prompts "$WORK/bad"
refuses 1 'nowhere' sample --init $TINY --prompts "$WORK/nowhere"
refuses 2 '--thinking has no meaning here: no line of .* is a chat' sample $chat --thinking on --prompts "$WORK/written"
refuses 2 '--stop-ids: 96 is outside the vocabulary of 96' sample --init $TINY --prompts "$WORK/six" --stop-ids 96
finish
