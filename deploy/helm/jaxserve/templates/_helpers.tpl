{{/* Names and labels; one pod for the Deployment and the JobSet. */}}

{{- define "jaxserve.name" -}}
{{- if contains "jaxserve" .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-jaxserve{{ end }}
{{- end }}

{{- define "jaxserve.selector" -}}
app.kubernetes.io/name: jaxserve
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "jaxserve.labels" -}}
{{ include "jaxserve.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "jaxserve.multiHost" -}}
{{- if and (eq .Values.accelerator "tpu") (gt (int .Values.tpu.hosts) 1) }}yes{{ end }}
{{- end }}

{{- define "jaxserve.cacheClaim" -}}
{{ .Values.cache.existingClaim | default (printf "%s-cache" (include "jaxserve.name" .)) }}
{{- end }}

{{/* Ask the server's /health, which needs no key. Of a slice's hosts only the first one listens. */}}
{{- define "jaxserve.probe" -}}
{{- if include "jaxserve.multiHost" . }}
exec:
  command:
    - python
    - -c
    - |
      import os, urllib.request
      if os.environ["JOB_COMPLETION_INDEX"] == "0":
          urllib.request.urlopen("http://127.0.0.1:8000/health", timeout=4)
{{- else }}
httpGet:
  path: /health
  port: http
{{- end }}
timeoutSeconds: 5
{{- end }}

{{- define "jaxserve.podMetadata" -}}
labels:
  {{- include "jaxserve.labels" . | nindent 2 }}
{{- $annotations := deepCopy .Values.podAnnotations }}
{{- if and (eq .Values.metrics.mode "annotations") (not .Values.apiKey.existingSecret) }}
{{- $scrape := dict "prometheus.io/scrape" "true" "prometheus.io/port" "8000" "prometheus.io/path" "/metrics" }}
{{- $annotations = merge $annotations $scrape }}
{{- end }}
{{- with $annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "jaxserve.podSpec" -}}

{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.serviceAccountName }}
serviceAccountName: {{ . }}
{{- end }}
automountServiceAccountToken: false
# The preStop pause, the requests that still run, and a reserve.
terminationGracePeriodSeconds: {{ add .Values.shutdownSeconds 25 }}
securityContext:
  runAsNonRoot: {{ ne (int .Values.runAsUser) 0 }}
  runAsUser: {{ .Values.runAsUser }}
  runAsGroup: {{ .Values.runAsUser }}
  fsGroup: {{ .Values.runAsUser }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- $nodes := deepCopy .Values.nodeSelector }}
{{- $tolerations := .Values.tolerations }}
{{- if eq .Values.accelerator "tpu" }}
{{- $nodes = merge $nodes (dict "cloud.google.com/gke-tpu-accelerator" .Values.tpu.accelerator "cloud.google.com/gke-tpu-topology" .Values.tpu.topology) }}
{{- if .Values.tpu.spot }}
{{- $nodes = merge $nodes (dict "cloud.google.com/gke-spot" "true") }}
{{- $tolerations = append $tolerations (dict "key" "cloud.google.com/gke-spot" "operator" "Equal" "value" "true" "effect" "NoSchedule") }}
{{- end }}
{{- $tolerations = append $tolerations (dict "key" "google.com/tpu" "operator" "Exists" "effect" "NoSchedule") }}
{{- else if eq .Values.accelerator "gpu" }}
{{- $nodes = merge $nodes .Values.gpu.nodeSelector }}
{{- $tolerations = append $tolerations (dict "key" "nvidia.com/gpu" "operator" "Exists" "effect" "NoSchedule") }}
{{- end }}
{{- with $nodes }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
containers:
  - name: jaxserve
    image: "{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}"
    imagePullPolicy: {{ .Values.image.pullPolicy }}
    args:
      - serve
      {{- with .Values.model }}
      - {{ . | quote }}
      {{- end }}
      - --host
      - 0.0.0.0
      - --port
      - "8000"
      - --shutdown-timeout
      - {{ .Values.shutdownSeconds | quote }}
      {{- if .Values.apiKey.existingSecret }}
      - --api-key-file
      - /run/secrets/jaxserve/{{ .Values.apiKey.key }}
      {{- end }}
      {{- range .Values.args }}
      - {{ . | quote }}
      {{- end }}
    env:
      - name: JAXSERVE_CACHE_DIR
        value: /cache
      - name: HF_HOME
        value: /models
      {{- if .Values.huggingFaceToken.existingSecret }}
      - name: HF_TOKEN
        valueFrom:
          secretKeyRef:
            name: {{ .Values.huggingFaceToken.existingSecret }}
            key: {{ .Values.huggingFaceToken.key }}
      {{- end }}
      {{- with .Values.env }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
    ports:
      - name: http
        containerPort: 8000
    {{- $resources := deepCopy .Values.resources }}
    {{- if eq .Values.accelerator "tpu" }}
    {{- $chips := dict "google.com/tpu" .Values.tpu.chips }}
    {{- $resources = merge $resources (dict "requests" $chips "limits" $chips) }}
    {{- else if eq .Values.accelerator "gpu" }}
    {{- $resources = merge $resources (dict "limits" (dict "nvidia.com/gpu" .Values.gpu.count)) }}
    {{- end }}
    {{- with $resources }}
    resources:
      {{- toYaml . | nindent 6 }}
    {{- end }}
    startupProbe:
      {{- include "jaxserve.probe" . | nindent 6 }}
      periodSeconds: 10
      failureThreshold: {{ .Values.probes.startup.failureThreshold }}
    readinessProbe:
      {{- include "jaxserve.probe" . | nindent 6 }}
      periodSeconds: {{ .Values.probes.readiness.periodSeconds }}
      failureThreshold: {{ .Values.probes.readiness.failureThreshold }}
    livenessProbe:
      {{- include "jaxserve.probe" . | nindent 6 }}
      periodSeconds: {{ .Values.probes.liveness.periodSeconds }}
      failureThreshold: {{ .Values.probes.liveness.failureThreshold }}
    lifecycle:
      preStop:
        exec:
          # Load balancers send requests for some seconds after a pod is told to end; the server refuses them then.
          command: ["sleep", "10"]
    securityContext:
      privileged: {{ .Values.privileged }}
      allowPrivilegeEscalation: {{ .Values.privileged }}
      {{- if not .Values.privileged }}
      capabilities:
        drop: ["ALL"]
      {{- end }}
    volumeMounts:
      - name: cache
        mountPath: /cache
      - name: models
        mountPath: /models
      - name: shared-memory
        mountPath: /dev/shm
      {{- if .Values.apiKey.existingSecret }}
      - name: api-keys
        mountPath: /run/secrets/jaxserve
        readOnly: true
      {{- end }}
volumes:
  - name: cache
    {{- if .Values.cache.enabled }}
    persistentVolumeClaim:
      claimName: {{ include "jaxserve.cacheClaim" . }}
    {{- else }}
    emptyDir: {}
    {{- end }}
  - name: models
    {{- with .Values.models.existingClaim }}
    persistentVolumeClaim:
      claimName: {{ . }}
    {{- else }}
    emptyDir: {}
    {{- end }}
  - name: shared-memory
    emptyDir:
      medium: Memory
  {{- if .Values.apiKey.existingSecret }}
  - name: api-keys
    secret:
      secretName: {{ .Values.apiKey.existingSecret }}
      defaultMode: 0440
  {{- end }}
{{- end }}
