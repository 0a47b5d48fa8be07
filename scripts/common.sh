# Sourced by the other scripts: numbers out of our own JSON, sizes for people, and a Python that can draw.

# The number under KEY in one line of our JSON: echo "$json" | json_number total_bytes
json_number() { sed -n "s/.*\"$1\": \([-+.0-9eE]*\).*/\1/p"; }

# The Python to draw with, or nothing: the first on PATH may lack matplotlib while the system's own has it.
python_with_matplotlib() {
    for python in ${PYTHON:-} python3 /usr/bin/python3; do
        if "$python" -c 'import matplotlib' 2>/dev/null; then
            echo "$python"
            return
        fi
    done
}

# Says that pictures are left out, and how to get them. $1: the command to repeat afterwards
pictures_skipped() {
    echo "No pictures: no Python with matplotlib here. Install it (Debian, Ubuntu: apt-get install python3-matplotlib), then $1."
}
