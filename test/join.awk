# Writes one C file of several test programs: awk -f test/join.awk HEADER ... TEST ...
#
# It includes the headers of all programs first, then the programs. A name that a program defines at file scope, and that another
# program or a header also defines, begins with the program's name while the program is included: #define models test_sp_models.
# The macros of a program end with it. main() runs the program by whose name the file is started.
function define(name) { if (!((FILENAME, name) in own)) { own[FILENAME, name]; owners[name]++; names[FILENAME] = names[FILENAME] " " name } }
# The constants of an enum { A, B = 2 };
function define_constants(text, part, i, n) {
    sub(/^[^{]*\{/, "", text)
    sub(/\}.*/, "", text)
    n = split(text, part, ",")
    for (i = 1; i <= n; i++) if (match(part[i], /[A-Za-z_]+[A-Za-z_0-9]*/)) define(substr(part[i], RSTART, RLENGTH))
}
function is_test() { return FILENAME ~ /\.c$/ }
FNR == 1 { inside = 0 }
FNR == 1 && is_test() { programs[++count] = FILENAME; folder = FILENAME; sub(/[^\/]*$/, "", folder) }
is_test() && /^[a-zA-Z]/ { code = FILENAME }
is_test() && code != FILENAME && /^#include "/ {
    name = $2
    if (name !~ /\// && name != "\"streambp.h\"") name = "\"" folder substr(name, 2)
    if (!(name in included)) { included[name]; headers = headers "#include " name "\n" }
}
is_test() && /^#define / { name = $2; sub(/\(.*/, "", name); macros[FILENAME] = macros[FILENAME] "#undef " name "\n" }
{ line = $0; sub(/ *\/\/.*/, "", line) }
inside { constants = constants line; if (line ~ /^\}|\};/) { inside = 0; define_constants(constants) } }
/^(typedef )?enum .*\{|^enum \{/ { if (line ~ /\}/) define_constants(line); else { inside = 1; constants = line } }
/^\} [A-Za-z_]/ { split(substr(line, 3), word, /[^A-Za-z_0-9]/); define(word[1]) }
/^typedef .*;/ && match(line, /[A-Za-z_0-9]+;/) { define(substr(line, RSTART, RLENGTH - 1)) }
/^(static |__attribute__)/ && line !~ /^static inline const struct \{/ {
    text = line
    sub(/ = .*/, "", text)
    while (sub(/__attribute__\(\(.*\)\) /, "", text));
    if (match(text, /[A-Za-z_0-9]+\(/)) define(substr(text, RSTART, RLENGTH - 1))
    else while (match(text, /[A-Za-z_0-9]+(\[[^\]]*\])*(,|;|$)/)) {
        name = substr(text, RSTART, RLENGTH)
        text = substr(text, RSTART + RLENGTH)
        sub(/[^A-Za-z_0-9].*/, "", name)
        define(name)
    }
}
END {
    printf "#define JOINED\n#include \"test/base/testing.h\"\n%s", headers
    for (i = 1; i <= count; i++) {
        file = programs[i]
        program = file
        sub(/.*\//, "", program)
        sub(/\.c$/, "", program)
        print "#define TEST_PROGRAM " program "\n#define main " program "_main"
        n = split(names[file], word)
        for (j = 1; j <= n; j++) if (owners[word[j]] > 1) print "#define " word[j] " " program "_" word[j]
        print "#include \"" file "\"\n#undef TEST_PROGRAM\n#undef main"
        for (j = 1; j <= n; j++) if (owners[word[j]] > 1) print "#undef " word[j]
        printf "%s", macros[file]
        run = run "    if (TEST_STARTED(\"" program "\")) return " program "_main(argc, argv);\n"
    }
    printf "int main(int argc, char **argv) {\n%s    fprintf(stderr, \"%%s is none of the programs\\n\", argv[0]);\n    return 2;\n}\n", run
}
