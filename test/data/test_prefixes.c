// Trees of documents that share prefixes: random tries against a map of prefixes; prompts of pairs and groups, families
// of plain documents, from shards to the trees of micro-batches.
#include "answer_files.h"
#include "tree_checks.h"
#include "llmc/data/prefetch.h"

// ---- random tries ---------------------------------------------------------------------------------------------------
enum { TRIE_TEXTS = 12, TRIE_LENGTH = 60 };

// Fills a batch with 1 to 12 texts, of one position or more. Most begin as another one does; some equal another, or are
// its prefix. Some targets are not trained on.
static void draw_texts(Batch *b) {
    int32_t text[TRIE_TEXTS][TRIE_LENGTH];
    size_t length[TRIE_TEXTS], ids = 2 + test_random_below(4);
    const size_t texts = 1 + test_random_below(TRIE_TEXTS);
    b->N = 0, b->documents = texts;
    for (size_t d = 0; d < texts; d++) {
        const size_t like = d ? test_random_below(d) : 0;
        size_t n = d && test_random_below(5) ? 1 + test_random_below(length[like]) : 0;
        if (d && !test_random_below(6)) n = length[like];
        memcpy(text[d], text[like], n * sizeof(int32_t));
        for (size_t more = test_random_below(12) + (n < 2 ? 2 - n : 0); more && n < TRIE_LENGTH; more--)
            text[d][n++] = (int32_t)test_random_below(ids);
        length[d] = n;
        b->document_start[d] = b->N;
        for (size_t t = 0; t + 1 < n; t++, b->N++) {
            b->tokens[b->N] = text[d][t], b->position[b->N] = (int32_t)t;
            b->targets[b->N] = test_random_below(3) ? text[d][t + 1] : -1;
        }
    }
    b->document_start[texts] = b->N;
}

typedef struct {
    uint64_t prefix, next; // hash of the tokens up to a position; token after it + 1, 0: unknown
} PrefixKey;

static int compare_keys(const void *a, const void *b) {
    const PrefixKey *x = (const PrefixKey *)a, *y = (const PrefixKey *)b;
    if (x->prefix != y->prefix) return x->prefix < y->prefix ? -1 : 1;
    return (x->next > y->next) - (x->next < y->next);
}

// Counts the distinct prefixes of the texts, each with the token after it: the rows of a tree that shares everything. A
// last target that is not trained on is equal to any.
static size_t distinct_prefixes(const Batch *b) {
    PrefixKey *key = (PrefixKey *)case_memory(b->N * sizeof(PrefixKey));
    size_t rows = 0;
    for (size_t d = 0; d < b->documents; d++) {
        uint64_t hash = 1;
        for (size_t t = b->document_start[d]; t < b->document_start[d + 1]; t++) {
            const int32_t next = t + 1 < b->document_start[d + 1] ? b->tokens[t + 1] : b->targets[t];
            hash = random_mix(hash ^ (uint64_t)b->tokens[t]);
            key[t].prefix = hash, key[t].next = (uint64_t)(next + 1);
        }
    }
    qsort(key, b->N, sizeof(PrefixKey), compare_keys);
    for (size_t i = 0; i < b->N; i++) {
        const int last = i + 1 == b->N || key[i + 1].prefix != key[i].prefix;
        rows += key[i].next ? !i || compare_keys(&key[i - 1], &key[i]) != 0 : last;
    }
    return rows;
}

TEST(random_tries) {
    SCOPED_BATCH b = batch_allocate(TRIE_TEXTS * TRIE_LENGTH, TRIE_TEXTS);
    PrefixText scratch[TRIE_TEXTS];
    size_t shared = 0, forked = 0, bounded = 0;
    batch_allocate_tree(&b, TRIE_TEXTS * TRIE_LENGTH);
    for (size_t i = 0; i < 10000; i++) {
        const size_t least = i % 3 ? 1 : 1 + test_random_below(8), forks = i % 3 < 2 ? SIZE_MAX : test_random_below(3);
        test_case("trie %zu: forks gain %zu rows, at most %zu forks", i, least, forks);
        draw_texts(&b);
        b.tree = prefixes_tree(&b, least, forks, scratch);
        if (b.tree) expect_tree(&b, least), shared++, forked += b.tree->forks > 0;
        if (b.tree && b.tree->forks > forks) test_fail("%zu forks", b.tree->forks);
        if (least == 1 && forks == SIZE_MAX) assert_int_equal(batch_rows(&b)->N, distinct_prefixes(&b));
        bounded += b.tree && forks < 3 && batch_rows(&b)->N > distinct_prefixes(&b);
    }
    assert_true(shared > 8000 && forked > 6000 && bounded > 500);
}

// The longest path: a comb has as few chains above a row as a balanced tree has many.
TEST(the_heaviest_branch_goes_on) {
    enum { TURNS = 40, TURN = 10 };
    SCOPED_BATCH b = batch_allocate(TURNS * TURN * TURNS, TURNS);
    PrefixText scratch[TURNS];
    batch_allocate_tree(&b, b.N);
    for (int drops = 0; drops < 2; drops++) { // each turn goes on, or drops its last tokens first
        b.N = 0;
        for (size_t d = 0; d < TURNS; d++) {
            const size_t n = (d + 1) * TURN;
            b.document_start[d] = b.N;
            for (size_t t = 0; t < n; t++, b.N++) {
                const size_t turn = t / TURN, dropped = drops && turn == d && t % TURN > 5 ? 1000 : 0;
                b.tokens[b.N] = (int32_t)(t + dropped), b.targets[b.N] = -1;
                if (t) b.targets[b.N - 1] = b.tokens[b.N];
                b.position[b.N] = (int32_t)t;
            }
        }
        b.document_start[TURNS] = b.N;
        b.tree = prefixes_tree(&b, 1, SIZE_MAX, scratch);
        expect_tree(&b, 1);
        assert_int_equal(b.tree->forks, drops ? TURNS - 1 : 0);
        assert_int_equal(b.tree->rows.N, TURNS * TURN + (drops ? (TURNS - 1) * 5 : 0)); // 6 tokens give 5 common rows
        for (size_t d = 0; d < TURNS; d++)
            assert_true(b.tree->first_piece[d + 1] - b.tree->first_piece[d] <= 2); // the trunk and a branch
    }
    case_end();
}

// Documents of a sample share what the index says, even if another sample leaves them a few rows before.
TEST(samples_keep_their_forks) {
    enum { TEXTS = 6, LENGTH = 200 };
    SCOPED_BATCH b = batch_allocate(TEXTS * LENGTH, TEXTS);
    PrefixText scratch[TEXTS];
    size_t group[TEXTS], common[TEXTS];
    batch_allocate_tree(&b, b.N);
    for (size_t t = 0; t < b.N; t++) { // three pairs that share 100 tokens with each other and 121 in themselves
        const size_t d = t / LENGTH, i = t % LENGTH, differs = i < 100 ? 0 : i < 121 ? 1 + d / 2 : 10 + d;
        b.tokens[t] = (int32_t)(1000 * differs + i), b.targets[t] = -1, b.position[t] = (int32_t)i;
        group[d] = d / 2, common[d] = d % 2 ? 120 : 0;
        b.document_start[d] = d * LENGTH;
    }
    b.document_start[TEXTS] = b.N, b.group = group, b.common = common;
    b.tree = prefixes_tree(&b, PREFIX_LEAST, 4, scratch);
    assert_true(b.tree && b.tree->forks == 4 && b.tree->rows.N == b.N - 3 * 120 - 2 * 99);
    expect_tree(&b, 21);
    b.tree = prefixes_tree(&b, PREFIX_LEAST, 3, scratch); // only the forks of the pairs
    assert_true(b.tree && b.tree->forks == 3 && b.tree->rows.N == b.N - 3 * 120);
    b.group = b.common = NULL;
}

// ---- prompts of pairs and groups ------------------------------------------------------------------------------------
typedef struct {
    size_t count, units, most;      // documents; pairs or groups; most documents of one
    size_t *unit, *prompt, *common; // [count] pair or group; tokens of its prompt; rows shared within it
    MadeDocument *document;
} Prompted;

// Makes pairs or groups whose documents begin with their prompt, of 60 to 160 tokens, and go on with ids that encode
// their place. In every fourth the first prompt ends with other tokens, up to 4.
static Prompted made_prompted(size_t units, size_t most) {
    Prompted p = {0, units, most, NULL, NULL, NULL, NULL};
    p.document = (MadeDocument *)case_memory(units * most * sizeof(MadeDocument));
    p.unit = (size_t *)case_memory(3 * units * most * sizeof(size_t));
    p.prompt = p.unit + units * most, p.common = p.prompt + units * most;
    for (size_t u = 0; u < units; u++) {
        const size_t prompt = 60 + test_random_below(100), differ = u % 4 ? 0 : test_random_below(5);
        const size_t members = 2 + test_random_below(most - 1);
        for (size_t k = 0; k < members; k++, p.count++) {
            MadeDocument *d = &p.document[p.count];
            *d = made_document(p.count, prompt + 1 + test_random_below(60), 0);
            for (size_t i = 1; i < d->tokens; i++) ((unsigned char *)(uintptr_t)d->counts)[i] = i >= prompt;
            for (size_t i = 0; i < prompt; i++)
                ((uint32_t *)(uintptr_t)d->id)[i] =
                    (uint32_t)((1 << (i + differ < prompt || k ? 24 : 25)) + u * DOCUMENT_IDS + i);
            d->prompt = prompt, d->group = u, d->reward = (float)test_normal();
            p.unit[p.count] = u, p.prompt[p.count] = prompt, p.common[p.count] = prompt - differ - 1;
        }
    }
    return p;
}

// Sums of a step: documents' origins, their squares, targets, positions, and the rows of their trees
typedef struct {
    double origin, squares, targets;
    size_t positions, rows;
} StepSums;

// Reads the step at the loader's position: a number of sequences, or with --samples as many as it has. Checks bounds
// and trees of every part of every sequence.
static StepSums read_step(DataLoader *loader, Batch *whole, size_t parts) {
    StepSums sums = {0, 0, 0, 0, 0};
    const SequenceBound bound = dataloader_part_bound(loader, parts);
    for (size_t k = loader->packing.step ? dataloader_step(loader, loader->next) : 1; k > 0; k--) {
        const uint64_t position = loader->next;
        const EpochSequences *e;
        size_t first, end = dataloader_samples(loader, position, &e, &first), indexed = 0, computed = 0;
        for (; first < end && loader->sample; first++) indexed += loader->sample[e->order[first]].rows;
        for (size_t i = 0; i < parts; i++) {
            loader->next = position;
            dataloader_next(loader, whole);
            const Batch part = dataloader_part(loader, whole, parts, i);
            const size_t rows = batch_rows(&part)->N;
            if (part.empty) continue;
            assert_true(part.N <= bound.N && part.documents <= bound.documents);
            if (bound.forks && rows > bound.rows) test_fail("%zu rows, at most %zu expected", rows, bound.rows);
            if (part.tree && part.tree->forks > bound.forks)
                test_fail("%zu forks of %zu", part.tree->forks, bound.forks);
            if (part.tree) expect_tree(&part, 1);
            assert_true(!part.tree || bound.forks);
            sums.targets += batch_count(&part).tokens, sums.positions += part.N, sums.rows += rows, computed += rows;
            for (size_t d = 0; d < part.documents; d++)
                sums.origin += (double)part.origin[d], sums.squares += (double)part.origin[d] * (double)part.origin[d];
        }
        if (loader->shares && loader->sample && computed > indexed) test_fail("%zu rows of %zu", computed, indexed);
    }
    return sums;
}

static void expect_same_step(StepSums a, StepSums b) {
    assert_true(a.origin == b.origin && a.squares == b.squares && a.targets == b.targets && a.positions == b.positions);
}

// Rows of all documents if each pair or group shares its prompt; `margin` tokens of it are not counted on.
static size_t prompted_rows(const Prompted *p, size_t margin) {
    size_t rows = 0;
    for (size_t d = 0; d < p->count; d++) {
        const int shares = d && p->unit[d] == p->unit[d - 1] && p->prompt[d] > PREFIX_LEAST;
        rows += p->document[d].tokens - 1;
        if (shares) rows -= margin ? p->prompt[d] - 1 - margin : p->common[d];
    }
    return rows;
}

TEST(prompts_are_computed_once) {
    static const ObjectiveKind kinds[] = {OBJECTIVE_DPO, OBJECTIVE_GRPO, OBJECTIVE_GSPO};
    for (size_t c = 0; c < 24; c++) {
        const Objective objective = objective_of(kinds[c % 3]);
        const MadeShard made = made_kind(objective_data[objective.kind]);
        test_case("case %zu", c);
        const Prompted p = made_prompted(40, c % 3 ? 6 : 2);
        DataSettings settings = answer_settings(1 + c % 2 * 2, 220, &objective);
        const char *path = write_shard("prompts.bin", &made, p.document, p.count);
        settings.step = c & 4 ? 7 : 0, settings.shuffle = c & 8 ? SHUFFLE_OFF : SHUFFLE_ON;
        SCOPED_LOADER off = open_data(path, &settings);
        settings.prefixes = c & 16 ? PREFIXES_OF_ALL : PREFIXES_OF_PROMPTS;
        SCOPED_LOADER on = open_data(path, &settings);
        const int packs_rows = settings.step || settings.prefixes == PREFIXES_OF_ALL;
        assert_true(on.shares == PREFIXES_OF_PROMPTS && !off.shares && on.packs_rows == packs_rows);
        assert_int_equal(on.positions, off.positions);
        assert_int_equal(on.rows, prompted_rows(&p, PREFIX_MARGIN));
        assert_int_equal(off.bound.rows + off.bound.forks, 0);
        assert_true(on.packing.capacity <= off.packing.capacity);
        assert_int_equal(dataloader_fingerprint(&on, 1) == dataloader_fingerprint(&off, 1), !packs_rows);
        assert_int_equal(dataloader_content_key(&on), dataloader_content_key(&off));
        SCOPED_BATCH a = batch_for(&on), b = batch_for(&off);
        allocation_guard = 1;
        for (size_t epoch = 0; epoch < 2; epoch++) {
            StepSums sum = {0, 0, 0, 0, 0};
            if (on.packing.shuffle) assert_int_equal(on.next, epoch * on.samples);
            for (uint64_t next = (epoch + 1) * on.samples; on.next < next;) {
                const StepSums shared = read_step(&on, &a, 1 + test_random_below(settings.step ? 1 : 3));
                sum.positions += shared.positions, sum.rows += shared.rows;
                if (!packs_rows || settings.step) expect_same_step(shared, read_step(&off, &b, 1));
            }
            assert_int_equal(sum.positions, on.positions);
            assert_int_equal(sum.rows, prompted_rows(&p, 0));
        }
        allocation_guard = 0;
    }
}

static void read_prompts(const void *context) {
    const Objective objective = objective_of(OBJECTIVE_DPO);
    DataSettings settings = answer_settings(1, 220, &objective);
    settings.prefixes = PREFIXES_OF_PROMPTS;
    DataLoader loader = open_data((const char *)context, &settings);
    Batch batch = batch_for(&loader);
    for (size_t i = 0; i < dataloader_batches(&loader); i++) dataloader_next(&loader, &batch);
    batch_free(&batch);
    dataloader_close(&loader);
}

TEST(a_prompt_that_its_pair_does_not_share) {
    const MadeShard made = made_kind(KIND_PAIRS);
    MadeDocument document[4];
    for (size_t d = 0; d < 4; d++) {
        document[d] = made_document(d, 150, 0);
        document[d].prompt = 100;
        for (size_t i = 1; i < 150; i++) ((unsigned char *)(uintptr_t)document[d].counts)[i] = i >= 100;
        for (size_t i = 0; i < 100; i++) ((uint32_t *)(uintptr_t)document[d].id)[i] = (uint32_t)i;
    }
    ((uint32_t *)(uintptr_t)document[3].id)[100 - PREFIX_MARGIN] = 5; // within the margin
    read_prompts(write_shard("pairs.bin", &made, document, 4));
    ((uint32_t *)(uintptr_t)document[3].id)[100 - PREFIX_MARGIN - 1] = 5;
    refused_by(read_prompts, write_shard("other.bin", &made, document, 4),
               "other.bin: document 3 marks a prompt of 100 tokens that its pair does not share");
    ((uint32_t *)(uintptr_t)document[3].id)[5] = 0;
    document[3].prompt = 100 - PREFIX_MARGIN - 1; // prompts of other lengths are not one prompt
    read_prompts(write_shard("lengths.bin", &made, document, 4));
}

// ---- families of plain documents ------------------------------------------------------------------------------------
// Makes `families` trajectories and documents alone, in any order. Documents of a trajectory continue it or leave it;
// all of them begin with the same system prompt.
static size_t made_families(MadeDocument *document, size_t families, size_t most, size_t alone, size_t tokens) {
    size_t count = 0;
    uint32_t ids = 1000;
    for (size_t f = 0; f < families + alone; f++) {
        const size_t members = f < families ? 1 + test_random_below(most) : 1;
        const size_t system = f % 2 ? 150 : 0, whole = 2 + test_random_below(tokens - 2);
        uint32_t *trunk = (uint32_t *)case_memory((whole + system) * sizeof(uint32_t));
        for (size_t i = 0; i < whole + system; i++) trunk[i] = i < system ? (uint32_t)i : ids++;
        for (size_t k = 0; k < members; k++, count++) {
            const size_t shared = k ? 1 + test_random_below(whole) : whole, n = max_size(shared, 2);
            const size_t left = k && test_random_below(2) ? min_size(test_random_below(100), n - 1) : 0;
            MadeDocument *d = &document[count];
            *d = made_document(count, min_size(n + system, tokens), 3);
            for (size_t i = 0; i < d->tokens; i++)
                ((uint32_t *)(uintptr_t)d->id)[i] = i + left < d->tokens ? trunk[i] : ids++;
            if (!k) d->prompt = 0;
        }
    }
    for (size_t i = count; i > 1; i--) {
        const size_t j = test_random_below(i);
        const MadeDocument moved = document[i - 1];
        document[i - 1] = document[j], document[j] = moved;
    }
    return count;
}

typedef struct {
    const uint32_t *id; // [n + 1]
    size_t n, number;   // positions, number of the document
} Plain;

static size_t plain_common(const Plain *a, const Plain *b) { // rows
    size_t i = 0;
    while (i <= a->n && i <= b->n && a->id[i] == b->id[i]) i++;
    return i ? i - 1 : 0;
}

static int compare_plain(const void *a, const void *b) {
    const Plain *x = (const Plain *)a, *y = (const Plain *)b;
    for (size_t i = 0; i <= x->n && i <= y->n; i++)
        if (x->id[i] != y->id[i]) return x->id[i] < y->id[i] ? -1 : 1;
    return x->n != y->n ? x->n < y->n ? -1 : 1 : x->number < y->number ? -1 : 1;
}

// Returns for each document the number of its family, without capacity: of all pairs of neighbours, joins the ones with
// most in common first.
static size_t *families_of(const MadeDocument *document, size_t count) {
    Plain *plain = (Plain *)case_memory(count * sizeof(Plain));
    size_t *family = (size_t *)case_memory(2 * count * sizeof(size_t)), *of = family + count, longest = 0;
    for (size_t d = 0; d < count; d++) {
        plain[d].id = document[d].id, plain[d].n = document[d].tokens - 1, plain[d].number = d;
        longest = max_size(longest, plain[d].n);
    }
    qsort(plain, count, sizeof(Plain), compare_plain);
    for (size_t i = 0; i < count; i++) of[i] = i;
    for (size_t common = longest; common >= PREFIX_LEAST; common--)
        for (size_t i = 1; i < count; i++) {
            size_t most[2] = {0, 0};
            const size_t a = of[i - 1], b = of[i];
            if (plain_common(&plain[i - 1], &plain[i]) != common) continue;
            for (size_t k = 0; k < count; k++)
                for (size_t side = 0; side < 2; side++)
                    if (of[k] == (side ? b : a)) most[side] = max_size(most[side], plain[k].n);
            for (size_t k = 0; k < count && 2 * common >= min_size(most[0], most[1]); k++)
                if (of[k] == b) of[k] = a;
        }
    for (size_t i = 0; i < count; i++) family[plain[i].number] = of[i];
    return family;
}

// Checks that the samples are the families, if none was cut: in one sample are documents of one family, all of them.
static void expect_families(const DataLoader *d, const size_t *family, size_t count) {
    size_t *sample = (size_t *)case_memory(count * sizeof(size_t));
    size_t positions = 0, rows = 0;
    for (size_t s = 0; s < d->samples; s++) {
        size_t first, end = documents_sample(d, s, &first);
        for (size_t i = first; i < end; i++) sample[d->segment[i].document] = s;
        if (!d->sample) continue;
        positions += d->sample[s].positions, rows += d->sample[s].rows;
        assert_true(d->sample[s].rows <= d->packing.capacity && d->sample[s].rows <= d->sample[s].positions);
        assert_true(d->sample[s].forks <= prefix_budget(d->sample[s].rows));
    }
    if (d->sample) assert_true(positions == d->positions && rows == d->rows);
    for (size_t i = 0; i < count; i++)
        for (size_t j = 0; j < i; j++) {
            const int together = sample[i] == sample[j], related = family[i] == family[j];
            if (together && !related) test_fail("documents %zu and %zu are one family", i, j);
            if (related && !together && !d->families_cut) test_fail("documents %zu and %zu are two families", i, j);
        }
}

TEST(families_lie_together) {
    size_t cut = 0, found = 0;
    for (size_t c = 0; c < 24; c++) {
        static MadeDocument document[200];
        const MadeShard made = c & 1 ? made_kind(KIND_VALUES) : made_shard(4);
        const Objective ppo = objective_of(OBJECTIVE_PPO);
        DataSettings settings = data_settings(1 + c % 3, c % 4 ? 700 : 300);
        test_case("case %zu", c);
        const size_t count = made_families(document, 12, 9, 20, settings.T + 1);
        for (size_t d = 0; d < count; d++) document[d].value = (const float *)case_memory(4 * document[d].tokens);
        const char *path = write_shard("families.bin", &made, document, count);
        settings.shuffle = c & 2 ? SHUFFLE_OFF : SHUFFLE_ON, settings.step = c & 4 ? 5 : 0;
        if (c & 1) settings.objective = &ppo;
        settings.prefixes = PREFIXES_OF_ALL;
        SCOPED_LOADER loader = open_data(path, &settings);
        SCOPED_BATCH batch = batch_for(&loader);
        expect_families(&loader, families_of(document, count), count);
        assert_true(loader.shares == PREFIXES_OF_ALL && loader.packing.capacity == settings.B * settings.T);
        found += loader.families, cut += loader.families_cut;
        allocation_guard = 1;
        for (size_t epoch = 0; epoch < 2; epoch++) {
            StepSums sum = {0, 0, 0, 0, 0};
            while (loader.next < (epoch + 1) * loader.samples) {
                const StepSums one = read_step(&loader, &batch, 1 + test_random_below(settings.step ? 1 : 2));
                sum.positions += one.positions, sum.rows += one.rows, sum.origin += one.origin;
            }
            double origins = 0, first = 0;
            for (size_t d = 0; d < count; d++) origins += first, first += (double)document[d].tokens;
            assert_true(sum.origin == origins && sum.positions == loader.positions && sum.rows <= loader.rows);
        }
        allocation_guard = 0;
        if (settings.shuffle == SHUFFLE_ON) expect_seeks(path, &settings, 60, NULL);
    }
    assert_true(found > 100 && cut > 5);
}

TEST(data_without_families_stays_as_it_is) {
    for (size_t c = 0; c < 8; c++) {
        const MadeShard made = made_kind(c & 4 ? KIND_LABELS : KIND_DOCUMENTS);
        const Objective kto = objective_of(OBJECTIVE_KTO);
        DataSettings settings = data_settings(2, 200);
        test_case("case %zu", c);
        MadeDocument *document = made_documents(0, 120, 190, 2);
        for (size_t d = 0; d < 120 && c & 4; d++) { // kto's answers stay alone, but share rows within a sequence
            document[d].reward = (float)(d % 2);
            for (size_t i = 0; i < min_size(100, document[d].tokens); i++)
                ((uint32_t *)(uintptr_t)document[d].id)[i] = (uint32_t)i;
        }
        const char *path = write_shard("alone.bin", &made, document, 120);
        settings.shuffle = c & 1 ? SHUFFLE_OFF : SHUFFLE_ON, settings.step = c & 2 ? 9 : 0;
        if (c & 4) settings.objective = &kto;
        SCOPED_LOADER off = open_data(path, &settings);
        settings.prefixes = PREFIXES_OF_ALL;
        SCOPED_LOADER on = open_data(path, &settings);
        SCOPED_BATCH a = batch_for(&on), b = batch_for(&off);
        size_t trees = 0;
        assert_true(!on.families && !on.packs_rows &&
                    dataloader_fingerprint(&on, 2) == dataloader_fingerprint(&off, 2));
        assert_true(on.bound.N == off.bound.N && on.bound.documents == off.bound.documents);
        for (size_t k = 0; k < 40; k++) {
            dataloader_next(&on, &a), dataloader_next(&off, &b);
            expect_same_batch(&a, &b);
            const Batch part = dataloader_part(&on, &a, 1, 0);
            if (part.tree) expect_tree(&part, PREFIX_LEAST), trees++;
            assert_true(on.next == off.next && (!part.tree || part.tree->rows.N <= on.bound.rows));
        }
        assert_true(c & 4 ? trees > 20 : !trees);
    }
}

int main(int argc, char **argv) { RUN_LISTED(argc, argv, scratch_remove); }
