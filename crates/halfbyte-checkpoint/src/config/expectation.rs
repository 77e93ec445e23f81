//! What a config leads one to expect of a module: quantised or dense.

use super::{
    AwqConfig, BitsAndBytesConfig, CompressedTensorsConfig, FpaIntBConfig, GptqConfig, HalfbyteConfig, ModelOptConfig,
    Mxfp4Config, QuantizationConfig,
};

/// Whether a config has a module quantised.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Expectation {
    /// It has, by these words of it.
    Quantized(String),
    /// It has not, by these words of it.
    Dense(String),
    /// It does not say.
    Unsaid,
}

use Expectation::{Dense, Quantized, Unsaid};

impl QuantizationConfig {
    /// Whether the config has a module quantised. Class names, such as `Linear`, are taken for the layers inside the
    /// repeated blocks and for the output head.
    pub(crate) fn expectation(&self, module: &str) -> Expectation {
        match self {
            QuantizationConfig::Gptq(config) => of_gptq(config, module),
            QuantizationConfig::Awq(config) => of_awq(config, module),
            QuantizationConfig::CompressedTensors(config) => of_compressed_tensors(config, module),
            QuantizationConfig::BitsAndBytes(config) => of_bitsandbytes(config, module),
            QuantizationConfig::FpaIntB(config) => of_fpa_intb(config, module),
            QuantizationConfig::Halfbyte(config) => of_halfbyte(config, module),
            QuantizationConfig::Mxfp4(config) => of_mxfp4(config, module),
            QuantizationConfig::ModelOpt(config) => of_modelopt(config, module),
        }
    }

    /// Name of the scheme whose tensors the config announces.
    pub(crate) fn scheme(&self) -> &'static str {
        match self {
            QuantizationConfig::Gptq(config) if config.marlin => "marlin",
            QuantizationConfig::Gptq(_) => "gptq",
            QuantizationConfig::Awq(_) => "awq",
            QuantizationConfig::CompressedTensors(_) => "compressed-tensors",
            QuantizationConfig::BitsAndBytes(_) => "bitsandbytes",
            QuantizationConfig::FpaIntB(_) => "fpa_intb",
            QuantizationConfig::Halfbyte(_) => "halfbyte",
            QuantizationConfig::Mxfp4(_) => "mxfp4",
            QuantizationConfig::ModelOpt(_) => "modelopt",
        }
    }

    /// Regular expressions that are not read, each with the field it stands in and the reason.
    pub(crate) fn unread_expressions(&self) -> Vec<(String, &str, &str)> {
        let lists: Vec<(String, &super::ModulePatterns)> = match self {
            QuantizationConfig::Gptq(c) => vec![("dynamic".into(), &c.dynamic.modules)],
            QuantizationConfig::Halfbyte(_) => Vec::new(),
            QuantizationConfig::FpaIntB(c) => vec![("exclude_modules".into(), &c.exclude_modules)],
            QuantizationConfig::Mxfp4(c) => vec![("modules_to_not_convert".into(), &c.modules_to_not_convert)],
            QuantizationConfig::ModelOpt(c) => vec![("ignore".into(), &c.ignore)],
            QuantizationConfig::Awq(c) => vec![("modules_to_not_convert".into(), &c.modules_to_not_convert)],
            QuantizationConfig::BitsAndBytes(c) => vec![("llm_int8_skip_modules".into(), &c.skip_modules)],
            QuantizationConfig::CompressedTensors(c) => {
                let targets = c.groups.iter().map(|g| (format!("the targets of {}", g.name), &g.targets));
                targets.chain([("ignore".into(), &c.ignore)]).collect()
            }
        };
        lists
            .into_iter()
            .flat_map(|(field, list)| list.unread().map(move |(text, why)| (field.clone(), text, why)))
            .collect()
    }
}

fn of_gptq(config: &GptqConfig, module: &str) -> Expectation {
    let dynamic = &config.dynamic;
    if let Some(at) = dynamic.modules.first(module) {
        let text = &dynamic.modules.texts()[at];
        return match dynamic.rules[at] {
            None => Dense(format!("the config leaves it out (dynamic, `{text}`)")),
            Some(_) if in_block(module) || is_head(module) => {
                Quantized(format!("the config has settings for it (dynamic, `{text}`)"))
            }
            Some(_) => Unsaid,
        };
    }
    if is_head(module) {
        return match config.lm_head {
            true => Quantized("the config says lm_head true".into()),
            false => Dense("the config does not say that lm_head is quantised".into()),
        };
    }
    let listed = &config.modules_in_block_to_quantize;
    if listed.is_empty() || !in_block(module) {
        return Unsaid;
    }
    let dotted = format!(".{module}");
    match listed.iter().find(|name| dotted.ends_with(&format!(".{name}"))) {
        Some(name) => Quantized(format!("the config's modules_in_block_to_quantize has `{name}`")),
        None => Dense("the config's modules_in_block_to_quantize does not have it".into()),
    }
}

fn of_awq(config: &AwqConfig, module: &str) -> Expectation {
    const LIST: &str = "modules_to_not_convert";
    match config.modules_to_not_convert.matching(module) {
        Some(part) => Dense(format!("the config's {LIST} has `{part}`")),
        None if in_block(module) => Quantized(format!("the config says awq, and its {LIST} does not have it")),
        None => Unsaid,
    }
}

fn of_mxfp4(config: &Mxfp4Config, module: &str) -> Expectation {
    const LIST: &str = "modules_to_not_convert";
    match config.modules_to_not_convert.matching(module) {
        Some(part) => Dense(format!("the config's {LIST} has `{part}`")),
        None if module.contains(".experts.") => {
            Quantized(format!("the config says mxfp4, and its {LIST} does not have it"))
        }
        None => Unsaid,
    }
}

fn of_modelopt(config: &ModelOptConfig, module: &str) -> Expectation {
    let Some(algorithm) = config.algorithm.as_deref() else {
        return Dense("the config names no algorithm for weights".into());
    };
    match config.ignore.matching(module) {
        Some(text) => Dense(format!("the config leaves it out (`{text}`)")),
        None if in_block(module) && algorithm != "mixed_precision" => {
            Quantized(format!("the config says {algorithm}, and does not leave it out"))
        }
        None => Unsaid,
    }
}

fn of_bitsandbytes(config: &BitsAndBytesConfig, module: &str) -> Expectation {
    const LIST: &str = "llm_int8_skip_modules";
    match config.skip_modules.matching(module) {
        Some(part) => Dense(format!("the config's {LIST} has `{part}`")),
        None if in_block(module) => {
            Quantized(format!("the config says {}, and its {LIST} does not have it", config.kind.name()))
        }
        None => Unsaid,
    }
}

fn of_fpa_intb(config: &FpaIntBConfig, module: &str) -> Expectation {
    const LIST: &str = "exclude_modules";
    match config.exclude_modules.matching(module) {
        Some(text) => Dense(format!("the config's {LIST} has `{text}`")),
        None if in_block(module) => {
            Quantized(format!("the config says {} bits, and its {LIST} does not have it", config.bits))
        }
        None => Unsaid,
    }
}

fn of_halfbyte(config: &HalfbyteConfig, module: &str) -> Expectation {
    match config.format_of(module) {
        None => Dense("the config's dense has it".into()),
        Some(format) if in_block(module) || config.modules.contains_key(module) => {
            Quantized(format!("the config says {format}"))
        }
        Some(_) => Unsaid,
    }
}

fn of_compressed_tensors(config: &CompressedTensorsConfig, module: &str) -> Expectation {
    let others = other_names(module);
    if let Some(text) = config.ignore.matching(module) {
        return Dense(format!("the config says to ignore it (`{text}`)"));
    }
    if let Some((other, text)) = others.iter().find_map(|other| Some((other, config.ignore.matching(other)?))) {
        return Dense(format!("the config says to ignore `{other}` (`{text}`), which it is joined in"));
    }
    for name in std::iter::once(module).chain(others.iter().map(String::as_str)) {
        if let Some((group, text)) = config.groups.iter().find_map(|g| Some((&g.name, g.targets.matching(name)?))) {
            return Quantized(format!("the config's {group} targets it (`{text}`)"));
        }
    }
    let class = config.groups.iter().find_map(|group| Some((&group.name, group.targets.class()?)));
    match class {
        Some((group, text)) if in_block(module) || is_head(module) => {
            Quantized(format!("the config's {group} targets `{text}`, and its ignore does not have it"))
        }
        Some(_) => Unsaid,
        None if config.groups.is_empty() => Unsaid,
        None => Dense("no group of the config targets it".into()),
    }
}

/// Whether a module lies inside one of the repeated blocks: its name has a number in it.
pub(crate) fn in_block(module: &str) -> bool {
    module.split('.').any(|part| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit()))
}

/// Whether a module is the output head.
pub(crate) fn is_head(module: &str) -> bool {
    module == "lm_head" || module.ends_with(".lm_head")
}

/// Layers that read the same vector, and the name of the layer that some programs join them in.
const JOINED: &[(&str, &[&str])] =
    &[("qkv_proj", &["q_proj", "k_proj", "v_proj"]), ("gate_up_proj", &["gate_proj", "up_proj"])];

/// Names under which a config may mean a module: the joined layer that it is a part of, or the parts that it joins.
/// Configs name the layers of the program that quantised, which need not be those of the files.
pub(crate) fn other_names(module: &str) -> Vec<String> {
    let (parent, own) = module.rsplit_once('.').map_or(("", module), |(parent, own)| (parent, own));
    let sibling = |name: &str| if parent.is_empty() { name.to_owned() } else { format!("{parent}.{name}") };
    for (joined, parts) in JOINED {
        if parts.contains(&own) {
            return vec![sibling(joined)];
        }
        if *joined == own {
            return parts.iter().map(|part| sibling(part)).collect();
        }
    }
    Vec::new()
}
