//! What is counted, in Prometheus' form.

use crate::served::Served;
use halfbyte_llm::schedule::Counts;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

type Labels = Vec<(&'static str, String)>;
type Times = Family<Labels, Histogram, fn() -> Histogram>;

/// Counters of requests and times, and what engines count.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    requests: Family<Labels, Counter>,
    open: Gauge,
    first_token: Times,
    each_token: Times,
    whole: Times,
    prompt_tokens: Family<Labels, Counter>,
    new_tokens: Family<Labels, Counter>,
}

/// Times from a millisecond to some minutes.
fn times() -> Histogram {
    Histogram::new([
        0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 1.5, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0, 300.0,
    ])
}

impl Metrics {
    /// Of a server with these models.
    pub fn new(models: &[Arc<Served>]) -> Self {
        let mut registry = Registry::with_prefix("halfbyte");
        let metrics = Self {
            registry: Registry::default(),
            requests: Family::default(),
            open: Gauge::default(),
            first_token: Family::new_with_constructor(times),
            each_token: Family::new_with_constructor(times),
            whole: Family::new_with_constructor(times),
            prompt_tokens: Family::default(),
            new_tokens: Family::default(),
        };
        registry.register("requests", "Requests that were answered, by path and status", metrics.requests.clone());
        registry.register("requests_open", "Requests that are not done", metrics.open.clone());
        let mut register = |name: &str, help: &str, times: &Times| registry.register(name, help, times.clone());
        register(
            "time_to_first_token_seconds",
            "From a request's head to the first token of a text",
            &metrics.first_token,
        );
        register("time_per_token_seconds", "Between a text's tokens, on average over each text", &metrics.each_token);
        register("request_seconds", "From a request's head to the end of its answer", &metrics.whole);
        registry.register("prompt_tokens", "Tokens of prompts", metrics.prompt_tokens.clone());
        registry.register("new_tokens", "Tokens that were written", metrics.new_tokens.clone());
        registry.register_collector(Box::new(OfEngines(models.to_vec())));
        Self { registry, ..metrics }
    }

    /// All of it, as text.
    pub fn text(&self) -> Result<String, fmt::Error> {
        let mut text = String::new();
        encode(&mut text, &self.registry)?;
        Ok(text)
    }

    pub(crate) fn opened(&self) {
        self.open.inc();
    }

    pub(crate) fn closed(&self, path: &'static str, status: u16, took: Duration) {
        self.open.dec();
        let labels = vec![("path", path.to_owned()), ("status", status.to_string())];
        self.requests.get_or_create(&labels).inc();
        self.whole.get_or_create(&vec![("path", path.to_owned())]).observe(took.as_secs_f64());
    }

    pub(crate) fn first_token(&self, model: &str, took: Duration) {
        self.first_token.get_or_create(&of_model(model)).observe(took.as_secs_f64());
    }

    pub(crate) fn each_token(&self, model: &str, took: Duration) {
        self.each_token.get_or_create(&of_model(model)).observe(took.as_secs_f64());
    }

    pub(crate) fn tokens(&self, model: &str, prompt: usize, new: usize) {
        self.prompt_tokens.get_or_create(&of_model(model)).inc_by(prompt as u64);
        self.new_tokens.get_or_create(&of_model(model)).inc_by(new as u64);
    }
}

fn of_model(model: &str) -> Labels {
    vec![("model", model.to_owned())]
}

/// What engines know when they are asked.
#[derive(Debug)]
struct OfEngines(Vec<Arc<Served>>);

impl OfEngines {
    /// One gauge, with a value for each of some labels.
    fn gauge(
        encoder: &mut DescriptorEncoder<'_>,
        name: &str,
        help: &str,
        values: &[(Labels, i64)],
    ) -> Result<(), fmt::Error> {
        let kind = prometheus_client::metrics::MetricType::Gauge;
        let mut of_name = encoder.encode_descriptor(name, help, None, kind)?;
        values.iter().try_for_each(|(labels, value)| ConstGauge::new(*value).encode(of_name.encode_family(labels)?))
    }

    fn counter(
        encoder: &mut DescriptorEncoder<'_>,
        name: &str,
        help: &str,
        values: &[(Labels, u64)],
    ) -> Result<(), fmt::Error> {
        let kind = prometheus_client::metrics::MetricType::Counter;
        let mut of_name = encoder.encode_descriptor(name, help, None, kind)?;
        values.iter().try_for_each(|(labels, value)| ConstCounter::new(*value).encode(of_name.encode_family(labels)?))
    }
}

impl Collector for OfEngines {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let counts: Vec<(&Served, Counts)> = self.0.iter().map(|served| (&**served, served.engine.counts())).collect();
        let with = |label: &'static str, value: &str, model: &Served| {
            vec![("model", model.name.clone()), (label, value.to_owned())]
        };
        let mut texts = Vec::new();
        let mut pages = Vec::new();
        for (model, counts) in &counts {
            let Counts { running, waiting, pages: all, free_pages, used_pages, .. } = *counts;
            texts.push((with("state", "running", model), running as i64));
            texts.push((with("state", "waiting", model), waiting as i64));
            let kept = all.saturating_sub(free_pages + used_pages);
            for (state, count) in [("used", used_pages), ("kept", kept), ("free", free_pages)] {
                pages.push((with("state", state, model), count as i64));
            }
        }
        Self::gauge(&mut encoder, "texts", "Texts that are written, and that wait for it", &texts)?;
        let help = "Pages of keys and values: of running texts, kept of ended ones for beginnings alike, free";
        Self::gauge(&mut encoder, "kv_pages", help, &pages)?;
        let of = |count: fn(&Counts) -> u64| -> Vec<(Labels, u64)> {
            counts.iter().map(|(model, counts)| (of_model(&model.name), count(counts))).collect()
        };
        for (name, help, count) in [
            ("steps", "Steps of the model", (|c: &Counts| c.steps) as fn(&Counts) -> u64),
            ("read_tokens", "Tokens that went through the model", |c| c.read_tokens),
            ("shared_tokens", "Tokens of prompts that another text had read", |c| c.shared_tokens),
            ("chosen_tokens", "Tokens that were chosen", |c| c.chosen_tokens),
            ("preemptions", "Times that a text gave up its pages and waited", |c| c.preempted),
        ] {
            Self::counter(&mut encoder, name, help, &of(count))?;
        }
        let mut memory = Vec::new();
        for (model, [free, all]) in counts.iter().filter_map(|(model, _)| Some((model, model.gpu_memory()?))) {
            memory.push((with("state", "free", model), free as i64));
            memory.push((with("state", "used", model), (all - free) as i64));
        }
        if !memory.is_empty() {
            Self::gauge(&mut encoder, "gpu_memory_bytes", "Memory of the GPU that a model lies on", &memory)?;
        }
        if let Some(bytes) = resident() {
            let help = "Memory of this process that is in use";
            Self::gauge(&mut encoder, "resident_memory_bytes", help, &[(Vec::new(), bytes)])?;
        }
        Ok(())
    }
}

/// Bytes of this process in memory, where the system tells.
pub fn resident() -> Option<i64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<i64>().ok()? * 1024)
}
