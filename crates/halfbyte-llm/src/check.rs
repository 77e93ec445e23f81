//! A checkpoint against its configuration: what is missing for the model to run, and what is there that it does not use.

use crate::arch::spec::{LinearSpec, NormKind, Shape};
use crate::config::Config;
use crate::shard;
use crate::tokenizer::Tokenizer;
use halfbyte_checkpoint::scheme::SCHEMES;
use halfbyte_checkpoint::{Cut, Finding, ModuleKind, Weights};
use rayon::prelude::*;
use std::collections::{BTreeMap, HashMap, HashSet};

/// What a configuration and the tensors say against each other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Contradictions {
    /// What keeps the model from running: tensors that are missing or of another shape.
    pub missing: Vec<Finding>,
    /// Layers that the configuration does not count: it is another model's, or the files are.
    pub uncounted: Option<Finding>,
    /// Tensors that the architecture does not use.
    pub unused: Vec<Finding>,
}

/// Holds a configuration against the tensors. No data is read, but of a head that is stored beside the embedding that it is.
pub fn contradictions(config: &Config, weights: &Weights) -> Contradictions {
    let names = weights.checkpoint().tensor_names();
    let there = names.filter_map(|name| layer_of(config, name)).collect();
    let spec = &config.spec;
    let names: Vec<&str> =
        spec.linears().map(|l| l.name.as_str()).chain([&*spec.embedding]).chain(spec.head.as_deref()).collect();
    // Zero points and group indices are looked at.
    let shapes = names.into_par_iter().filter_map(|name| match weights.kind(name) {
        Ok(ModuleKind::Quantized(scheme)) => Some((name, (scheme.describe)(weights, name).ok()?.shape)),
        _ => None,
    });
    let shapes = shapes.collect();
    let cuts = shard::cuts_of_part(spec, weights);
    let (known, denied) = (HashSet::new(), HashSet::new());
    let mut check = Check { config, weights, there, shapes, cuts, known, denied, missing: Vec::new() };
    check.tensors();
    check.layers_that_are_missing();
    let missing = check.missing;
    let (uncounted, unused) = unused(config, weights, &check.known, &check.denied);
    Contradictions { missing: Finding::shortened(missing), uncounted, unused: Finding::shortened(unused) }
}

impl Contradictions {
    /// All of them, the worst first.
    pub fn into_findings(self) -> Vec<Finding> {
        self.missing.into_iter().chain(self.uncounted).chain(self.unused).collect()
    }
}

/// What is wrong with a model's tokenizer, if anything is: it is missing, cannot be read, or has ids that the model does not.
pub fn tokenizer(config: &Config, weights: &Weights) -> Option<Finding> {
    let finding = |text: String| Some(Finding { subject: "the tokenizer".to_owned(), text });
    match Tokenizer::from_weights(weights) {
        Err(why) => finding(format!("cannot be read: {why}")),
        Ok(tokenizer) => {
            let most = tokenizer.vocabulary().into_values().max().map_or(0, |id| id as usize + 1);
            let vocab = config.spec.vocab;
            if most <= vocab {
                return None;
            }
            finding(format!("has ids up to {}, and the configuration a vocabulary of {vocab}", most - 1))
        }
    }
}

struct Check<'a> {
    config: &'a Config,
    weights: &'a Weights,
    /// Layers of which some tensor is there.
    there: HashSet<usize>,
    /// Of quantised modules that can be read.
    shapes: HashMap<&'a str, [usize; 2]>,
    /// What a rank's part holds of them.
    cuts: HashMap<String, Cut>,
    /// Modules of the architecture, in these layers and outside of them.
    known: HashSet<&'a str>,
    /// Dense ones of them that have a bias, and none by the configuration.
    denied: HashSet<&'a str>,
    missing: Vec<Finding>,
}

impl<'a> Check<'a> {
    fn tensors(&mut self) {
        let spec = &self.config.spec;
        let table = Shape { n: spec.vocab, k: spec.hidden, bias: false };
        self.linear(&spec.embedding, table);
        for LinearSpec { name, shape } in spec.linears() {
            self.linear(name, *shape);
        }
        for (norm, len) in spec.norms() {
            self.vector(&norm.name, "weight", len);
            if norm.kind == NormKind::Layer {
                self.vector(&norm.name, "bias", len);
            }
        }
        for sinks in spec.sinks() {
            if let Some((module, part)) = sinks.rsplit_once('.') {
                self.vector(module, part, spec.heads.heads);
                self.known.insert(sinks);
            }
        }
        if let Some(head) = &spec.head {
            self.linear(head, table);
        }
    }

    fn tell(&mut self, subject: &str, text: String) {
        self.missing.push(Finding { subject: subject.to_owned(), text });
    }

    /// Whether nothing of the layer is there that a tensor belongs to: this is told once.
    fn is_of_absent_layer(&self, name: &str) -> bool {
        layer_of(self.config, name).is_some_and(|layer| !self.there.contains(&layer))
    }

    fn linear(&mut self, name: &'a str, shape: Shape) {
        if self.is_of_absent_layer(name) {
            return;
        }
        self.known.insert(name);
        let whole = Cut::whole(shape.matrix());
        let cut = self.cuts.get(name).unwrap_or(&whole);
        let ([n, k], biased) = (cut.shape(), shape.bias && cut.bias);
        let checkpoint = self.weights.checkpoint();
        let got = match self.weights.kind(name) {
            // Told of by the checkpoint itself.
            Err(_) => return,
            Ok(ModuleKind::Absent) => {
                return self.tell(name, format!("is missing: a matrix of {n} × {k}, by the configuration"));
            }
            Ok(ModuleKind::Dense) => checkpoint.get(&format!("{name}.weight")).map(|info| info.shape.to_vec()),
            Ok(ModuleKind::Quantized(_)) => self.shapes.get(name).map(|shape| shape.to_vec()),
        };
        if let Some(got) = got.filter(|got| *got != [n, k]) {
            self.tell(name, format!("is of shape {got:?}, and {n} × {k} by the configuration"));
        }
        let bias = checkpoint.get(&format!("{name}.bias")).map(|info| (info.shape.to_vec(), info.dtype));
        match bias {
            None if biased => self.tell(name, "has no bias, and has one by the configuration".to_owned()),
            Some((got, _)) if got != [n] => {
                self.tell(name, format!("has a bias of shape {got:?}, and {n} outputs by the configuration"));
            }
            Some((_, dtype)) if dtype.float().is_none() => {
                self.tell(name, format!("has a bias of {dtype}, which is not read; F16, BF16 and F32 are"));
            }
            // Some programs write biases of nothing but zeros to quantised layers.
            Some(_) if !shape.bias && matches!(self.weights.kind(name), Ok(ModuleKind::Dense)) => {
                self.denied.insert(name);
            }
            _ => {}
        }
    }

    fn vector(&mut self, name: &'a str, part: &str, len: usize) {
        if self.is_of_absent_layer(name) {
            return;
        }
        self.known.insert(name);
        let tensor = format!("{name}.{part}");
        let info = self.weights.checkpoint().get(&tensor).map(|info| (info.shape.to_vec(), info.dtype));
        match info {
            None => self.tell(&tensor, format!("is missing: {len} numbers, by the configuration")),
            Some((shape, _)) if shape != [len] => {
                self.tell(&tensor, format!("is of shape {shape:?}, and of {len} numbers by the configuration"));
            }
            Some((_, dtype)) if dtype.float().is_none() => {
                self.tell(&tensor, format!("is {dtype}, which is not read; F16, BF16 and F32 are"));
            }
            Some(_) => {}
        }
    }

    /// Layers of which nothing is there, told in a sentence instead of one for each tensor.
    fn layers_that_are_missing(&mut self) {
        let count = self.config.spec.layers.len();
        let absent: Vec<usize> = (0..count).filter(|layer| !self.there.contains(layer)).collect();
        let (Some(&first), Some(&last)) = (absent.first(), absent.last()) else { return };
        let (which, is) = match absent.len() {
            1 => (format!("layer {first}"), "is"),
            some if last - first + 1 == some => (format!("layers {first} to {last}"), "are"),
            some => (format!("{some} layers, the first of them {first},"), "are"),
        };
        let there = count - absent.len();
        self.tell(&which, format!("{is} missing: of the {count} layers of the configuration {there} are there"));
    }
}

/// The number of the layer that a tensor belongs to, by the name of the configuration's first layer.
fn layer_of(config: &Config, name: &str) -> Option<usize> {
    let norm = &config.spec.layers.first()?.attention.norm.name;
    let before = &norm[..norm.find(".0.")? + 1];
    name.strip_prefix(before)?.split('.').next()?.parse().ok()
}

/// Tensors that programs leave in files and that say nothing: they follow from the configuration.
const NEGLIGIBLE: &[&str] = &[
    "rotary_emb.inv_freq",
    "attn.masked_bias",
    "attn.bias",
    "attention.masked_bias",
    "attention.bias",
    "k_scale",
    "v_scale",
    "rope_freqs.weight",
];

/// Layers beyond those that the configuration counts, and tensors that the architecture has no use for, nor, as biases that are
/// denied, the configuration.
fn unused(
    config: &Config,
    weights: &Weights,
    known: &HashSet<&str>,
    denied: &HashSet<&str>,
) -> (Option<Finding>, Vec<Finding>) {
    let checkpoint = weights.checkpoint();
    let count = config.spec.layers.len();
    let mut beyond: Option<usize> = None;
    let mut others: BTreeMap<(String, bool), usize> = BTreeMap::new();
    for name in checkpoint.tensor_names() {
        if let Some(layer) = layer_of(config, name).filter(|&layer| layer >= count) {
            beyond = Some(beyond.unwrap_or(0).max(layer));
            continue;
        }
        let is_part = |part: &str| {
            name.strip_suffix(part).and_then(|rest| rest.strip_suffix('.')).is_some_and(|m| known.contains(m))
        };
        let parts = SCHEMES.iter().flat_map(|scheme| scheme.parts).copied().chain(["weight", "bias"]);
        let negligible =
            NEGLIGIBLE.iter().any(|ending| name.ends_with(ending)) || is_second_embedding(config, weights, name);
        let is_denied = name.strip_suffix(".bias").is_some_and(|module| denied.contains(module));
        if !is_denied && (negligible || known.contains(name) || { parts }.any(is_part)) {
            continue;
        }
        // Of all layers alike, one sentence.
        let pattern = match layer_of(config, name) {
            Some(layer) => name.replacen(&format!(".{layer}."), ".*.", 1),
            None => name.to_owned(),
        };
        *others.entry((pattern, is_denied)).or_default() += 1;
    }
    let beyond = beyond.map(|last| Finding {
        subject: "num_hidden_layers".to_owned(),
        text: format!("is {count} in the configuration, and there are tensors of layers up to {last}"),
    });
    let tied = config.spec.head.is_none();
    let unused = others.into_iter().map(|((subject, is_denied), count)| {
        let text = match (count, tied && subject.starts_with("lm_head.")) {
            _ if is_denied => "is there, but by the configuration its layer has no bias: it is not used".to_owned(),
            (_, true) => {
                "is there, but the configuration says tie_word_embeddings: the embedding is the head".to_owned()
            }
            (1, false) => format!("is not a tensor of {}; it is not used", config.architecture),
            (count, false) => {
                format!("are {count} tensors that {} does not have; they are not used", config.architecture)
            }
        };
        Finding { subject, text }
    });
    (beyond, unused.collect())
}

/// Whether it is a head that is stored though it is the embedding, number by number.
fn is_second_embedding(config: &Config, weights: &Weights, name: &str) -> bool {
    if config.spec.head.is_some() || name != "lm_head.weight" {
        return false;
    }
    let embedding = format!("{}.weight", config.spec.embedding);
    let [a, b] = [name, &embedding].map(|name| weights.checkpoint().data(name));
    let same = matches!((&a, &b), (Ok(a), Ok(b)) if a == b);
    [name, &embedding].into_iter().for_each(|name| weights.checkpoint().release(name));
    same
}
