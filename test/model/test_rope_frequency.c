/*
Frequencies of rotary positions equal transformers' to the bit: test/golden/rotary.txt has a hash of each
configuration's, and its factor of cosine and sine.
*/
#include "llmc/base/file.h"
#include "llmc/base/hash.h"
#include "llmc/model/config_text.h"
#include "llmc/model/rope_frequency.h"
#include "test/base/testing.h"

TEST(frequencies_are_those_of_torch) {
    size_t length, rows = 0, wrong = 0;
    char *text = input_read_text("test/golden/rotary.txt", (size_t)1 << 20, &length), config[512];
    unsigned long long wanted;
    double factor;
    int taken;
    for (char *line = text; sscanf(line, "%511s %16llx %lf\n%n", config, &wanted, &factor, &taken) == 3;
         line += taken) {
        float frequency[512];
        const Config c = config_from_text(config, "test", EXIT_USAGE);
        const int both = c.rope_local_base_freq > 0;
        rope_frequencies(&c, 0, frequency);
        if (both) rope_frequencies(&c, 1, frequency + rotary_width(&c) / 2);
        const uint64_t found = fnv1a(FNV_BEGIN, frequency, (rotary_width(&c) / 2 << both) * sizeof(float));
        if (found != wanted) wrong++, printf("other frequencies: %s\n", config);
        assert_true(fabs(rope_attention_factor(&c, 0) - factor) <= 1e-15 * factor);
        rows++;
    }
    free(text);
    assert_int_equal(rows, 415);
    assert_int_equal(wrong, 0);
}

int main(int argc, char **argv) { RUN_LISTED(argc, argv, NULL); }
