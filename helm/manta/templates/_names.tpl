{{/* What things are called, and by which labels they are found. */}}

{{/* Short enough that "-head-svc" and a pod's suffix still fit into 63 characters. */}}
{{- define "manta.name" -}}
{{- $name := contains "manta" .Release.Name | ternary .Release.Name (printf "%s-manta" .Release.Name) -}}
{{- .Values.fullnameOverride | default $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "manta.labels" -}}
app.kubernetes.io/name: manta
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* Labels of a component's pods, which do not change with the release. Takes (root, component). */}}
{{- define "manta.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: manta
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{/* Labels of Ray's pods, besides KubeRay's own, by one of which (app.kubernetes.io/name) the head's Service finds it. Takes
     (root, component). */}}
{{- define "manta.rayLabels" -}}
app.kubernetes.io/part-of: manta
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{/* The label that KubeRay puts on all pods of our RayCluster. */}}
{{- define "manta.raySelector" -}}
ray.io/cluster: {{ include "manta.name" . }}
{{- end -}}

{{/* Image of Manta's own. Takes (root, name). */}}
{{- define "manta.image" -}}
{{- $root := index . 0 -}}
{{- with $root.Values.image.registry }}{{ . }}/{{ end }}{{ index . 1 }}:{{ $root.Values.image.tag | default $root.Chart.AppVersion }}
{{- end -}}

{{/* KubeRay names the Service of a head after its cluster. */}}
{{- define "manta.rayAddress" -}}
{{- .Values.ray.address | default (printf "%s-head-svc:6379" (include "manta.name" .)) -}}
{{- end -}}

{{- define "manta.databaseSecret" -}}
{{- .Values.database.existingSecret | default (printf "%s-postgresql" (include "manta.name" .)) -}}
{{- end -}}

{{- define "manta.keysSecret" -}}
{{- .Values.keys.existingSecret | default (printf "%s-keys" (include "manta.name" .)) -}}
{{- end -}}

{{- define "manta.raySecret" -}}
{{- .Values.ray.tokenSecret | default (printf "%s-ray" (include "manta.name" .)) -}}
{{- end -}}

{{- define "manta.jobsClaim" -}}
{{- .Values.jobs.existingClaim | default (printf "%s-jobs" (include "manta.name" .)) -}}
{{- end -}}

{{- define "manta.checkpointsClaim" -}}
{{- .Values.checkpoints.claim.existingClaim | default (printf "%s-checkpoints" (include "manta.name" .)) -}}
{{- end -}}

{{/* The account of control planes and nodes; empty: the namespace's default one. */}}
{{- define "manta.serviceAccount" -}}
{{- if .Values.serviceAccount.name }}{{ .Values.serviceAccount.name }}
{{- else if or .Values.serviceAccount.annotations (contains "kubernetes" .Values.ray.nodeNotices) }}{{ include "manta.name" . }}-node
{{- end }}
{{- end -}}

{{/* A random value that is made at the first install and kept. Takes (root, secret, key, value for a new one). */}}
{{- define "manta.keptSecret" -}}
{{- $root := index . 0 -}}
{{- $known := lookup "v1" "Secret" $root.Release.Namespace (index . 1) -}}
{{- $data := ($known | default dict).data | default dict -}}
{{- if hasKey $data (index . 2) }}{{ index $data (index . 2) }}{{ else }}{{ index . 3 | b64enc }}{{ end -}}
{{- end -}}
