# What scripts that set up an environment share; sourced.

# installing PIP LOG [arguments of pip install]: all that pip says goes to the log; shown are the large files that it fetches, and every 10
# seconds how long it has been at work, with its last line. Returns pip's exit code.
installing() {
    local pip=$1 log=$2 status=0 begun=$SECONDS beat
    shift 2
    (
        trap 'kill "$!"; exit' TERM
        while :; do
            sleep 10 >/dev/null 2>&1 & # one that outlives this holds nobody up
            wait "$!"
            echo "pip, $((SECONDS - begun)) s so far: $(tail -n 1 "$log" | cut -c 1-120)"
        done
    ) &
    beat=$!
    trap "kill $beat 2>/dev/null || :" EXIT # Ctrl-C does not end what runs in the background
    "$pip" install --disable-pip-version-check --progress-bar off "$@" 2>&1 | tee -a "$log" |
        { grep --line-buffered -E 'Downloading .*\([0-9]{2,}(\.[0-9]+)? [MG]B\)' || :; } || status=$?
    kill "$beat"
    wait "$beat" 2>/dev/null || :
    trap - EXIT
    return "$status"
}
