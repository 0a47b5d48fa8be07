#!/bin/sh
# scripts/recipes/: rounds of reasoning, files with their tests, rewards for long writing; each recipe at toy size.
. test/cli.sh
. test/find_python.sh
find_or_make_python
run_python "$DATA_MODULES" test/scripts/test_recipes.py 'the recipes of scripts/recipes'
