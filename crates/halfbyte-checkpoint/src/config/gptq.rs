//! What a GPTQ checkpoint declares, Marlin's repacking of GPTQ among them.

use super::patterns::{Meaning, ModulePatterns};
use super::{Fields, group_size, object, short, symmetry};
use crate::error::{Error, Result};
use serde::Serialize;
use serde_json::Value;
use std::path::PathBuf;

/// How GPTQ files store zero points.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum GptqVersion {
    /// `gptq`: the zero point less one.
    #[serde(rename = "gptq")]
    V1,
    /// `gptq_v2`: the zero point itself.
    #[serde(rename = "gptq_v2")]
    V2,
}

impl GptqVersion {
    /// The name that configs use.
    pub fn name(self) -> &'static str {
        match self {
            GptqVersion::V1 => "gptq",
            GptqVersion::V2 => "gptq_v2",
        }
    }
}

/// What a GPTQ checkpoint declares. The tensors have the last word on most of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct GptqConfig {
    /// The file that says so.
    pub file: PathBuf,
    /// Bits a code: 2, 3, 4 or 8.
    pub bits: u32,
    /// Group size along k, if it says; inner None: one group a channel (−1 in the file).
    pub group_size: Option<Option<usize>>,
    /// Whether every zero point is the middle code, if it says.
    pub sym: Option<bool>,
    /// Whether columns were quantised in another order (act-order).
    pub desc_act: bool,
    /// Whether groups were fixed before columns were reordered, so that act-order leaves no trace.
    pub static_groups: bool,
    /// How zero points are stored.
    pub version: GptqVersion,
    /// Whether the tensors are Marlin's, which hold no zero points.
    pub marlin: bool,
    /// Whether the output head is quantised too.
    pub lm_head: bool,
    /// Modules with settings of their own, or none (`dynamic`).
    pub dynamic: GptqDynamic,
    /// Ends of the names of the only modules in a block that are quantised; empty: all are.
    pub modules_in_block_to_quantize: Vec<String>,
}

/// Rules for some modules, the first that matches a name being the one that counts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct GptqDynamic {
    /// Expressions behind `+:` or `-:`; without either, `+:` is meant.
    pub modules: ModulePatterns,
    /// For each of them: None, the module stays dense (`-:`); or what it has of its own.
    pub rules: Vec<Option<GptqOverride>>,
}

/// What a module has of its own.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct GptqOverride {
    /// Bits a code.
    pub bits: Option<u32>,
    /// Group size along k; inner None: one group a channel.
    pub group_size: Option<Option<usize>>,
    /// Whether every zero point is the middle code.
    pub sym: Option<bool>,
    /// Whether columns were quantised in another order.
    pub desc_act: Option<bool>,
}

/// The settings that a config has for one module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GptqSettings {
    pub bits: u32,
    pub group_size: Option<Option<usize>>,
    pub sym: Option<bool>,
    pub desc_act: bool,
    /// Whether group indices have to say more than `j / group size`.
    pub act_order: bool,
    /// Whether the config has one set of settings for all modules. Tensors that contradict it are an error then; where
    /// modules have their own, the tensors are followed.
    pub of_all: bool,
    /// Whether these are the module's settings for sure. They are not if a rule is not read that may be for it.
    pub known: bool,
}

impl GptqConfig {
    /// The settings of a module.
    pub(crate) fn settings_of(&self, module: &str) -> GptqSettings {
        let first = self.dynamic.modules.first(module);
        let unread = self.dynamic.modules.first_unread();
        let known = unread.is_none_or(|unread| first.is_some_and(|first| first < unread));
        let own = first.filter(|_| known).and_then(|at| self.dynamic.rules[at].clone()).unwrap_or_default();
        let desc_act = own.desc_act.unwrap_or(self.desc_act);
        GptqSettings {
            bits: own.bits.unwrap_or(self.bits),
            group_size: own.group_size.or(self.group_size),
            sym: own.sym.or(self.sym).filter(|_| known),
            desc_act,
            act_order: desc_act && !self.static_groups && known,
            of_all: self.dynamic.rules.is_empty(),
            known,
        }
    }
}

/// Whether these fields are of GPTQ's tensors in Marlin's packing.
fn is_marlin(fields: &Fields<'_>, method: Option<&str>, format: Option<&str>) -> Result<bool> {
    let flag = fields.boolean(&["is_marlin_format"])?;
    Ok(method == Some("marlin") || format == Some("marlin") || flag == Some(true))
}

/// The fields of a config that is GPTQ's.
pub(super) fn parse(fields: &Fields<'_>, method: Option<&str>, format: Option<&str>) -> Result<GptqConfig> {
    let file = fields.file;
    let marlin = is_marlin(fields, method, format)?;
    let version = match format {
        None | Some("gptq" | "marlin") => GptqVersion::V1,
        Some("gptq_v2") => GptqVersion::V2,
        Some(other) => return super::not_read(fields, "checkpoint_format", other),
    };
    match fields.text(&["pack_dtype"])?.as_deref() {
        None | Some("int32") => {}
        Some(other) => return super::not_read(fields, "pack_dtype", other),
    }
    let bits = match bits(fields)? {
        Some(bits) if marlin && bits != 4 => {
            let what = format!("`{}`: Marlin's files have 4 bits only, got {bits}", fields.path("bits"));
            return Err(Error::unsupported(file, what));
        }
        Some(bits) => bits,
        None if marlin => 4,
        None => {
            return Err(Error::malformed(file, format!("expected the field `{}`, found none", fields.path("bits"))));
        }
    };
    Ok(GptqConfig {
        file: file.to_owned(),
        bits,
        group_size: group_size(fields)?,
        sym: symmetry(fields)?,
        desc_act: desc_act(fields)?.unwrap_or(false),
        static_groups: fields.boolean(&["static_groups"])?.unwrap_or(false),
        version,
        marlin,
        lm_head: fields.boolean(&["lm_head"])?.unwrap_or(false),
        dynamic: dynamic(fields)?,
        modules_in_block_to_quantize: modules_in_block(fields)?,
    })
}

fn bits(fields: &Fields<'_>) -> Result<Option<u32>> {
    match fields.integer(&["bits", "w_bit", "wbits"])? {
        None => Ok(None),
        Some(bits @ (2 | 3 | 4 | 8)) => Ok(Some(bits as u32)),
        Some(bits) => {
            let what = format!("`{}`: expected 2, 3, 4 or 8, got {bits}", fields.path("bits"));
            Err(Error::unsupported(fields.file, what))
        }
    }
}

fn desc_act(fields: &Fields<'_>) -> Result<Option<bool>> {
    fields.boolean(&["desc_act", "act_order"])
}

fn dynamic(fields: &Fields<'_>) -> Result<GptqDynamic> {
    let Some(listed) = object(fields, "dynamic")? else { return Ok(GptqDynamic::default()) };
    let mut rules = Vec::with_capacity(listed.fields.len());
    for text in listed.fields.keys() {
        rules.push(if text.starts_with("-:") {
            None
        } else {
            let own = object(&listed, text)?;
            let own = own.map(|own| {
                Ok(GptqOverride {
                    bits: bits(&own)?,
                    group_size: group_size(&own)?,
                    sym: symmetry(&own)?,
                    desc_act: desc_act(&own)?,
                })
            });
            Some(own.transpose()?.unwrap_or_default())
        });
    }
    let modules = ModulePatterns::new(listed.fields.keys().cloned().collect(), |text| {
        Meaning::Expression(text.strip_prefix("+:").or(text.strip_prefix("-:")).unwrap_or(text))
    });
    Ok(GptqDynamic { modules, rules })
}

/// The names in a list, or in lists within a list: those of one are quantised before those of the next.
fn modules_in_block(fields: &Fields<'_>) -> Result<Vec<String>> {
    const KEY: &str = "modules_in_block_to_quantize";
    /// Every module is held against every name; a block has some ten layers.
    const MAX_NAMES: usize = 1024;
    let mut names = Vec::new();
    let flat = match fields.fields.get(KEY) {
        None | Some(Value::Null) => return Ok(names),
        Some(Value::Array(values)) => values.iter().flat_map(|value| match value {
            Value::Array(inner) => inner.as_slice(),
            single => std::slice::from_ref(single),
        }),
        Some(other) => {
            let what = format!("`{}`: expected a list of names, got {}", fields.path(KEY), short(other));
            return Err(Error::malformed(fields.file, what));
        }
    };
    for value in flat {
        if names.len() == MAX_NAMES {
            let what = format!("`{}`: expected at most {MAX_NAMES} names, got more", fields.path(KEY));
            return Err(Error::unsupported(fields.file, what));
        }
        match value.as_str() {
            Some(name) => names.push(name.to_owned()),
            None => {
                let what = format!("`{}`: expected names in its lists, got {}", fields.path(KEY), short(value));
                return Err(Error::malformed(fields.file, what));
            }
        }
    }
    Ok(names)
}
