# fish completion for brine(1)

function __brine_complete
    set -l before (commandline -opc)[2..-1]
    set -l current (commandline -ct)
    set -l prefix
    if string match -qr -- '^--[^=]+=' $current
        set prefix (string replace -r -- '=.*' '=' $current)
        set -a before (string trim -r -c = -- $prefix)
        set current (string replace -- $prefix '' $current)
    end
    for line in (brine --complete $before "$current" 2>/dev/null)
        switch $line
            case :files
                __fish_complete_path "$current"
            case :folders
                __fish_complete_directories "$current"
            case :users
                __fish_complete_users
            case :groups
                __fish_complete_groups
            case '*'
                printf '%s\n' "$prefix$line"
        end
    end
end

complete -c brine -f -a '(__brine_complete)'
