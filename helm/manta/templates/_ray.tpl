{{/* The processes of Ray. KubeRay would put a shell around `ray start`; an annotation has it take the command as it is,
     and rayStartParams say the same once more for its autoscaler. */}}

{{/* Options of `ray start` that all nodes have: the ports that docs/deploy/ray.md names. */}}
{{- define "manta.rayOptions" -}}
node-ip-address: $(POD_IP)
node-manager-port: "6380"
object-manager-port: "6381"
dashboard-agent-grpc-port: "6382"
runtime-env-agent-port: "6383"
metrics-export-port: "6384"
min-worker-port: "10002"
max-worker-port: "10999"
object-store-memory: "80000000"
{{- end -}}

{{- define "manta.headOptions" -}}
{{ include "manta.rayOptions" . }}
port: "6379"
include-dashboard: "false"
num-cpus: "0"
num-gpus: "0"
{{- end -}}

{{/* One CPU more than ranks, as Ray counts them: for each it keeps a process ready that an agent can take. Takes
     (root, group). */}}
{{- define "manta.workerOptions" -}}
{{- $root := index . 0 -}}{{- $group := index . 1 -}}
{{ include "manta.rayOptions" $root }}
address: {{ include "manta.rayAddress" $root }}
num-cpus: {{ include "manta.ranks" $group | int | add1 | quote }}
num-gpus: {{ $group.gpus | default 0 | int | quote }}
{{- if $group.slots }}
resources: {{ dict "manta_slot" (int $group.slots) | toJson | squote }}
{{- end }}
{{- end -}}

{{/* What the autoscaler can add, as MANTA_NODE_SHAPES has it. */}}
{{- define "manta.nodeShapes" -}}
{{- $shapes := list -}}
{{- range .Values.ray.workerGroups -}}
{{- $unit := ternary "gpus" "slots" (not (empty .gpus)) -}}
{{- $shapes = append $shapes (printf "%s=%dx%s %s" .name (int .maxReplicas) (include "manta.ranks" .) $unit) -}}
{{- end -}}
{{- join ", " $shapes -}}
{{- end -}}

{{/* Takes ("head" or "", options). */}}
{{- define "manta.rayCommand" -}}
- ray
- start
{{- if index . 0 }}
- --head
{{- end }}
- --block
- --disable-usage-stats
{{- range $name, $value := index . 1 | fromYaml }}
- {{ printf "--%s=%s" $name $value | squote }}
{{- end }}
{{- end -}}

{{/* The same as KubeRay reads them: JSON in quotes, as its autoscaler unquotes it. */}}
{{- define "manta.rayStartParams" -}}
{{- range $name, $value := . | fromYaml }}
{{- if eq $name "resources" }}
resources: {{ printf "%s" ($value | quote) | squote }}
{{- else if ne $name "node-ip-address" }}
{{ $name }}: {{ $value | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{/* What processes of Ray find in their environment. */}}
{{- define "manta.rayVariables" -}}
{{ include "manta.rayToken" . }}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
# Memory belongs to the trainers: the kernel ends those, Ray would end their agents.
- {name: RAY_memory_monitor_refresh_ms, value: "0"}
{{- end -}}

{{/* Takes the port that answers while Ray lives. */}}
{{- define "manta.rayProbes" -}}
startupProbe: {tcpSocket: {port: {{ . }}}, periodSeconds: 2, failureThreshold: 150}
livenessProbe: {tcpSocket: {port: {{ . }}}, periodSeconds: 10, timeoutSeconds: 5, failureThreshold: 12}
readinessProbe: {tcpSocket: {port: {{ . }}}, periodSeconds: 5, timeoutSeconds: 5}
{{- end -}}
