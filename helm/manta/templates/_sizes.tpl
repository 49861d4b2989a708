{{/* Arithmetic of memory. */}}

{{/* A quantity such as 8Gi in mebibytes, rounded down. */}}
{{- define "manta.mebibytes" -}}
{{- $text := toString . -}}
{{- $number := regexFind "^[0-9.]+" $text | float64 -}}
{{- $unit := regexFind "[A-Za-z]*$" $text -}}
{{- $bytes := dict "" 1 "k" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- divf (mulf $number (index $bytes $unit)) 1048576 | floor | int64 -}}
{{- end -}}

{{/* Ranks that fit into a pod of a worker group. */}}
{{- define "manta.ranks" -}}
{{- .gpus | default .slots -}}
{{- end -}}

{{/* Size of a worker's /dev/shm: two snapshots and others' backups, 28 bytes a parameter of each rank, and Ray's object
     store, for which 160 MiB are ample. */}}
{{- define "manta.sharedMemory" -}}
{{- if .sharedMemory.size -}}
{{ .sharedMemory.size }}
{{- else -}}
{{- $bytes := mul 28 (int64 .sharedMemory.parametersPerRank) (include "manta.ranks" . | int64) -}}
{{ add 160 (divf $bytes 1048576 | ceil | int64) }}Mi
{{- end -}}
{{- end -}}
