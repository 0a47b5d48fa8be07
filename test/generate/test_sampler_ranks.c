// Generation by ranks that hold shards of the weights: they gather them for each other, so all must write the same
// text.
#include "sampler_run.h"
#include "llmc/files/weights.h"

enum { TOKENS = 24 };

// Different draws per rank imitate logits that are rounded differently.
TEST(ranks_write_one_text) {
    const char *const text = "llama,hidden_size=16,intermediate_size=24,num_hidden_layers=3,num_attention_heads=2,"
                             "num_key_value_heads=1,vocab_size=50";
    Config config = config_from_text(text, "test", EXIT_USAGE);
    RunSettings settings = sampling_run(5, TOKENS);
    const World world = {dist_ranks(), dist_rank(), ZERO_WEIGHTS, 1};
    SamplingSettings sampling = {1, 0, 0, 1, 7 + dist_rank()};
    int32_t ids[TOKENS] = {3, 1, 4}, first[TOKENS];
    settings.world = world;
    Run *run = run_open(&config, settings, NULL);
    weights_init_random(&run->model, weights_sharding(&run->tiny.s.memory), run->tiny.ops, run->tiny.s.memory.weights,
                        5);
    generate(run, ids, 3, TOKENS, &sampling);
    memcpy(first, ids, sizeof(first));
    dist_broadcast(RANKS_ALL, first, sizeof(first), 0);
    assert_memory_equal(ids, first, sizeof(first));
    run_close(run);
}

int main(int argc, char **argv) {
    dist_start();
    if (dist_ranks() < 2) die_usage("takes several processes: test/ranks/mpirun.sh 2 %s", argv[0]);
    dist_split(1);
    RUN_LISTED(argc, argv, NULL);
}
