//! GGUF's blocks, see [`crate::gguf`]: codes and scales of a matrix in one tensor, `weight`. Beside blocks of NVFP4 `scale` may be a
//! number by which all of them are multiplied; `input_scale` is of activations, which are not quantised here.

use super::template::KEY;
use super::{Description, Scheme, StoredFormat, StoredModule, StoredWeight, Weights};
use crate::checkpoint::TensorInfo;
use crate::config::read_object;
use crate::error::{Error, Result};
use crate::folder::converted;
use crate::gguf::{
    self, GgmlType, MOST_VALUES, architecture_of, follow_from, gguf_name, has_paired_rows, hf_row, is_frequencies,
    is_read, metadata_from, pack, reordered, rope_factors, scaled,
};
use crate::json::{self, read_small};
use crate::safetensors::{DType, TensorSpec, cast_floats};
use crate::target::{Form, Settings, unrepresentable};
use crate::writer::Writer;
use halfbyte::{Float, Group, QTensor, WeightFormat, Zero};
use serde_json::{Map, Value, json};
use std::borrow::Cow;
use std::path::Path;

/// The scheme's line in [`super::SCHEMES`].
pub(super) const SCHEME: Scheme = Scheme {
    name: "gguf",
    parts: &["weight", "scale", "input_scale"],
    activations: &[],
    detect: |weights, prefix| {
        let info = weights.checkpoint().get(&format!("{prefix}.weight"));
        info.is_some_and(|info| matches!(info.dtype, DType::Block(block) if block.weight_format().is_some()))
    },
    describe: |weights, prefix| {
        let (info, block, shape) = matrix(weights, prefix)?;
        let mut format = block.weight_format().ok_or_else(|| {
            Error::unsupported(info.file, format!("tensor `{}`: blocks of {block} are not read", info.name))
        })?;
        if scale_of(weights, prefix, block)?.is_some() {
            format.scale = Float::F32;
        }
        Ok(Description { format: StoredFormat::Codes(format), shape, act_order: false, findings: Vec::new() })
    },
    load: |weights, prefix| {
        let (info, block, shape) = matrix(weights, prefix)?;
        let scale = scale_of(weights, prefix, block)?;
        let tensor = scaled(info.name, block, weights.checkpoint().data(info.name)?, shape, scale)?;
        Ok(StoredModule { weight: StoredWeight::Quantized(tensor), findings: Vec::new() })
    },
};

/// What the scales of a module are multiplied by, if there is such a number. Error: a tensor that is no number.
fn scale_of(weights: &Weights, prefix: &str, block: GgmlType) -> Result<Option<f32>> {
    let (checkpoint, name) = (weights.checkpoint(), format!("{prefix}.scale"));
    let Some(info) = checkpoint.get(&name).filter(|_| block == GgmlType::NVFP4) else { return Ok(None) };
    match *checkpoint.data(&name)? {
        [a, b, c, d] if info.dtype == DType::F32 => Ok(Some(f32::from_le_bytes([a, b, c, d]))),
        _ => {
            let what = format!("tensor `{name}`: expected one number of F32, got {} {:?}", info.dtype, info.shape);
            Err(Error::malformed(info.file, what))
        }
    }
}

fn matrix<'a>(weights: &'a Weights, prefix: &str) -> Result<(TensorInfo<'a>, GgmlType, [usize; 2])> {
    let info = weights.checkpoint().info(&format!("{prefix}.weight"))?;
    match (info.dtype, info.shape) {
        (DType::Block(block), &[n, k]) => Ok((info, block, [n, k])),
        (dtype, shape) => {
            let what = format!("tensor `{}`: expected a matrix of blocks, got {dtype} {shape:?}", info.name);
            Err(Error::malformed(info.file, what))
        }
    }
}

/// The format nearest to this one that a module of this shape can have. Error: why there is none.
pub(crate) fn nearest(format: WeightFormat, [n, k]: [usize; 2]) -> std::result::Result<WeightFormat, String> {
    const BLOCK: usize = 32;
    if n == 0 || k == 0 || !k.is_multiple_of(BLOCK) {
        return Err(format!("inputs must be a multiple of {BLOCK}, got {k}"));
    }
    let bits = if format.bits == 8 { 8 } else { 4 };
    let zero = if bits == 8 || format.zero == Zero::Symmetric { Zero::Symmetric } else { Zero::Float };
    Ok(WeightFormat { bits, group: Group::Size(BLOCK), zero, scale: Float::F16, channel_scale: None })
}

/// The blocks of one of [`nearest`]'s formats.
fn block_of(format: WeightFormat) -> GgmlType {
    match (format.bits, format.zero) {
        (8, _) => GgmlType::Q8_0,
        (_, Zero::Symmetric) => GgmlType::Q4_0,
        _ => GgmlType::Q4_1,
    }
}

/// The embedding's name, whose rows have to be as many as the vocabulary.
const EMBEDDING: &str = "token_embd.weight";

/// The head, as configs of Hugging Face's form have it.
const HEAD: &str = "lm_head.weight";

/// End tokens that a file has places for: of a text, a turn and a message.
const MOST_ENDS: usize = 3;

/// Says in a tokenizer that texts begin with the config's token for it, where it says nothing of tokens around a text and no
/// `tokenizer_config.json` says otherwise: such models are read so, and lists would say that there is none.
fn begin(tokenizer: &mut Value, config: &Map<String, Value>, beside: &Path) -> Result<()> {
    let bos = config.get("bos_token_id").and_then(|id| id.as_u64().or_else(|| id.as_array()?.first()?.as_u64()));
    let Some(bos) = bos.filter(|_| tokenizer.get("post_processor").is_none_or(Value::is_null)) else { return Ok(()) };
    if beside.is_file() {
        let text = read_small(beside)?;
        let fields =
            json::fields(&text, MOST_VALUES).map_err(|e| Error::malformed(beside, format!("expected JSON: {e}")))?;
        if !fields.iter().any(|(field, value)| field == "add_bos_token" && value.get() == "true") {
            return Ok(());
        }
    }
    let added = tokenizer.get("added_tokens").and_then(Value::as_array).into_iter().flatten();
    let added = added.filter_map(|token| Some((token.get("content")?.as_str()?, token.get("id")?)));
    let listed = tokenizer.pointer("/model/vocab").and_then(Value::as_object).into_iter().flatten();
    let mut all = added.chain(listed.map(|(token, id)| (token.as_str(), id)));
    let Some(token) = all.find(|(_, id)| id.as_u64() == Some(bos)).map(|(token, _)| token.to_owned()) else {
        return Ok(());
    };
    let special = json!({"SpecialToken": {"id": &token, "type_id": 0}});
    let [a, b] = [("A", 0), ("B", 1)].map(|(id, kind)| json!({"Sequence": {"id": id, "type_id": kind}}));
    tokenizer["post_processor"] = json!({
        "type": "TemplateProcessing", "single": [&special, &a], "pair": [&special, &a, &b],
        "special_tokens": {&token: {"id": &token, "ids": [bos], "tokens": [&token]}},
    });
    Ok(())
}

/// Adds the tokens that settings of generation name to those of a config: ends that it has not, and a beginning where it has none.
/// Errors: what is no JSON object; more ends than a file holds.
fn add_tokens(config: &mut Map<String, Value>, file: &Path) -> Result<()> {
    const EOS: &str = "eos_token_id";
    let Some(settings) = read_object(file)? else { return Ok(()) };
    let list = |fields: &Map<String, Value>, field: &str| match fields.get(field) {
        None | Some(Value::Null) => Vec::new(),
        Some(Value::Array(list)) => list.clone(),
        Some(one) => vec![one.clone()],
    };
    let mut ends = list(config, EOS);
    let before = ends.len();
    for id in list(&settings, EOS) {
        if !ends.contains(&id) {
            ends.push(id);
        }
    }
    if ends.len() > before {
        if ends.len() > MOST_ENDS {
            let expected = format!("at most {MOST_ENDS} end tokens in config.json and generation_config.json together");
            return Err(Error::invalid("write GGUF", expected, format!("`{EOS}` {}", Value::Array(ends))));
        }
        config.insert(EOS.into(), ends.into());
    }
    const BOS: &str = "bos_token_id";
    if let (true, Some(first)) = (list(config, BOS).is_empty(), list(&settings, BOS).first()) {
        config.insert(BOS.into(), first.clone());
    }
    Ok(())
}

/// Writes a GGUF file.
pub(crate) struct GgufForm {
    config: Map<String, Value>,
    tokenizer: Value,
    chat_template: Option<String>,
    /// Further ones, by their names.
    named_templates: Vec<(String, String)>,
    head_dim: usize,
    vocab_size: usize,
    /// Whether rows of q and k lie in pairs.
    paired_rows: bool,
    /// Whether the embedding is the head.
    tied: bool,
    extra: Vec<(TensorSpec, Vec<u8>)>,
}

impl GgufForm {
    /// Errors: no config or tokenizer; what GGUF cannot say of them, or of the tokens in settings of generation.
    pub fn new(source: &Weights) -> Result<Self> {
        let mut config = source.model_config()?;
        if source.own_config()?.is_none() {
            add_tokens(&mut config, &source.folder().join("generation_config.json"))?;
        }
        let tokenizer = match source.own_tokenizer()? {
            Some(tokenizer) => tokenizer,
            None => {
                let file = source.folder().join("tokenizer.json");
                let mut tokenizer = json::parse_at_most(&read_small(&file)?, MOST_VALUES)
                    .map_err(|e| Error::malformed(&file, format!("expected JSON: {e}")))?;
                begin(&mut tokenizer, &config, &source.folder().join("tokenizer_config.json"))?;
                tokenizer
            }
        };
        let (chat_template, named_templates) = (source.chat_template()?, source.named_templates()?);
        // Before any work: what the metadata cannot say, whatever the type of the matrices.
        metadata_from(&config, &tokenizer, GgmlType::F16, chat_template.as_deref())?;
        let factors = rope_factors(&config)?;
        if let Some(factors) = factors.as_deref().filter(|factors| !is_read(&config, factors).unwrap_or(false)) {
            let expected = "factors of rotary frequencies that a config can say again";
            return Err(Error::invalid("write GGUF", expected, format!("{factors:?}")));
        }
        let extra = factors.map(|factors| {
            let spec = TensorSpec { name: "rope_freqs.weight".into(), dtype: DType::F32, shape: vec![factors.len()] };
            (spec, bytemuck::cast_slice(&factors).to_vec())
        });
        let head_dim = gguf::head_dim(&config)?;
        let vocab_size = config.get("vocab_size").and_then(Value::as_u64).unwrap_or_default() as usize;
        let known = architecture_of(&config)?;
        let paired_rows = known.rows == gguf::Rows::Paired;
        // As configs of these families have it where they do not say.
        let by_default = matches!(known.family, gguf::Family::Gemma2 | gguf::Family::Gemma3 | gguf::Family::Bloom);
        let tied = config.get("tie_word_embeddings").and_then(Value::as_bool).unwrap_or(by_default);
        Ok(Self {
            config,
            tokenizer,
            chat_template,
            named_templates,
            head_dim,
            vocab_size,
            paired_rows,
            tied,
            extra: extra.into_iter().collect(),
        })
    }

    fn name(hf: &str) -> Result<String> {
        gguf_name(hf).ok_or_else(|| {
            unrepresentable(hf, "gguf")("the models that GGUF is written of have no tensor of this name".into())
        })
    }

    /// Error: a tensor, of this name there, that readers refuse beside the config.
    fn check_shape(&self, hf: &str, name: &str, shape: &[usize]) -> Result<()> {
        let whole_heads = shape.first().is_some_and(|rows| rows.is_multiple_of(self.head_dim));
        let expected = match name {
            EMBEDDING if !matches!(*shape, [rows, _] if rows == self.vocab_size) => {
                format!("the {} rows of vocab_size", self.vocab_size)
            }
            _ if self.paired_rows && has_paired_rows(name) && !whole_heads => {
                format!("whole heads of {} rows", self.head_dim)
            }
            _ => return Ok(()),
        };
        Err(unrepresentable(hf, "gguf")(format!("expected {expected}, got {shape:?}")))
    }

    /// Rows in GGUF's order, for the tensor of this name there.
    fn in_order<'a>(&self, name: &str, rows: usize, data: Cow<'a, [u8]>) -> Cow<'a, [u8]> {
        match self.paired_rows && has_paired_rows(name) {
            true => Cow::Owned(reordered(&data, rows, |row| hf_row(row, self.head_dim))),
            false => data,
        }
    }
}

impl Form for GgufForm {
    fn specs(&self, module: &str, format: WeightFormat, shape: [usize; 2]) -> Vec<TensorSpec> {
        let name = format!("{module}.weight");
        let name = gguf_name(&name).unwrap_or(name);
        vec![TensorSpec { name, dtype: DType::Block(block_of(format)), shape: shape.to_vec() }]
    }

    fn pack(&self, module: &str, q: &QTensor, put: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()> {
        let name = Self::name(&format!("{module}.weight"))?;
        self.check_shape(module, &name, &[q.n(), q.k()])?;
        let blocks = pack(module, block_of(q.format()), q)?;
        put(&self.in_order(&name, q.n(), Cow::Owned(blocks)))
    }

    /// Vectors are f32, as llama.cpp wants them.
    fn dense(&self, tensor: &TensorSpec) -> Result<Option<TensorSpec>> {
        // They follow from the config, or are refused.
        if is_frequencies(&tensor.name) {
            return Ok(None);
        }
        // Who finds an output there takes it for the head.
        if self.tied && tensor.name == HEAD {
            return Ok(None);
        }
        let name = Self::name(&tensor.name)?;
        if tensor.dtype.float().is_none() {
            return Err(unrepresentable(&tensor.name, "gguf")(format!("expected floats, got {}", tensor.dtype)));
        }
        self.check_shape(&tensor.name, &name, &tensor.shape)?;
        let dtype = if tensor.shape.len() == 1 { DType::F32 } else { tensor.dtype };
        Ok(Some(TensorSpec { name, dtype, shape: tensor.shape.clone() }))
    }

    fn check_left_out(&self, tensor: &TensorSpec, data: &[u8]) -> Result<()> {
        if tensor.name == HEAD {
            return Ok(());
        }
        let float = tensor.dtype.float();
        if float.is_some_and(|float| follow_from(&self.config, cast_floats(float, data).as_floats())) {
            return Ok(());
        }
        let reason =
            "its numbers are not the rotary frequencies that the config gives, and there is no place for others";
        Err(unrepresentable(&tensor.name, "gguf")(reason.into()))
    }

    fn dense_data<'a>(&self, tensor: &TensorSpec, data: Cow<'a, [u8]>) -> Result<Cow<'a, [u8]>> {
        let data = match tensor.dtype.float() {
            Some(float) if tensor.shape.len() == 1 && float != Float::F32 => {
                Cow::Owned(converted(cast_floats(float, data).as_floats(), Float::F32, &tensor.name)?)
            }
            _ => data,
        };
        let rows = tensor.shape.first().copied().unwrap_or(1);
        Ok(self.in_order(&Self::name(&tensor.name)?, rows, data))
    }

    fn extra(&self) -> &[(TensorSpec, Vec<u8>)] {
        &self.extra
    }

    fn only_file(&self) -> Option<&'static str> {
        Some("model.gguf")
    }

    fn config(&self, _: &Settings<'_>) -> Result<Option<Value>> {
        Ok(None)
    }

    fn create(&self, dir: &Path, tensors: &[TensorSpec], model: &Settings<'_>, _: u64) -> Result<Writer> {
        let specs: Vec<gguf::TensorSpec> = tensors
            .iter()
            .map(|t| {
                let ggml_type = GgmlType::try_from(t.dtype).map_err(unrepresentable(&t.name, "gguf"))?;
                Ok(gguf::TensorSpec { name: t.name.clone(), ggml_type, shape: t.shape.clone() })
            })
            .collect::<Result<_>>()?;
        // Of a dense model, the type of the largest matrix.
        let file_type = model.commonest(|format| block_of(*format)).or_else(|| {
            let largest = specs.iter().max_by_key(|spec| spec.shape.iter().product::<usize>());
            largest.map(|spec| spec.ggml_type)
        });
        let template = self.chat_template.as_deref();
        let file_type = file_type.unwrap_or(GgmlType::F16);
        let mut metadata = metadata_from(&self.config, &self.tokenizer, file_type, template)?;
        if !self.named_templates.is_empty() {
            let names = self.named_templates.iter().map(|(name, _)| name.clone()).collect();
            metadata.push((format!("{KEY}s"), gguf::Value::Array(gguf::Array::String(names))));
        }
        for (name, template) in &self.named_templates {
            metadata.push((format!("{KEY}.{name}"), gguf::Value::String(template.clone())));
        }
        gguf::create(dir.join("model.gguf"), &metadata, &specs)
    }
}
