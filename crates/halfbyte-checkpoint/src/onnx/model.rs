//! One ONNX file: its initialisers, and the nodes that multiply by quantised ones.

use super::proto::{self, Field, Slice};
use super::tensor::Initializer;
use crate::error::{Error, Result};
use std::collections::HashMap;
use std::path::Path;

/// Graphs within nodes of graphs that are followed, as in branches of an `If`.
const MAX_DEPTH: usize = 16;

/// What a model file holds, as far as weights go.
#[derive(Clone, Debug, PartialEq)]
pub struct Model {
    initializers: Vec<Initializer>,
    by_name: HashMap<String, usize>,
    products: Vec<MatMulNBits>,
    metadata: Vec<(String, String)>,
}

/// A `com.microsoft.MatMulNBits` node: the quantised weight that it multiplies by, named by its initialisers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MatMulNBits {
    /// Name of the node; may be empty.
    pub node: String,
    /// Name of the module, of which there is one: that of the weight without the endings that quantisers add.
    pub prefix: String,
    /// Codes.
    pub weight: String,
    /// Scales.
    pub scales: String,
    /// Zero points; without them all are `2^(bits−1)`.
    pub zero_points: Option<String>,
    /// Block of each column, if that is not `j / block_size`.
    pub g_idx: Option<String>,
    /// Bias `[n]`.
    pub bias: Option<String>,
    /// Outputs.
    pub n: usize,
    /// Length of the reduction.
    pub k: usize,
    /// Bits a code.
    pub bits: u32,
    /// Neighbours along k that share a scale.
    pub block_size: usize,
    /// What the activations may become: 0 nothing said, 1 f32, 2 f16, 3 bf16, 4 int8.
    pub accuracy_level: u32,
}

impl Model {
    /// Parses a file whose whole content is `bytes`, and follows graphs within graphs. Nothing but small integers is
    /// copied: initialisers are ranges of the file.
    ///
    /// Tensors of strings are left out, and so is a product that has the weight and all else in common with an earlier
    /// one. *Errors* name the file and the tensor or node: a file that is not a model, a tensor whose shape, type or
    /// place do not fit each other or the file, external data outside the folder, a name that appears twice, a product
    /// whose inputs are not initialisers or whose attributes are missing, out of range or unknown.
    pub fn parse(bytes: &[u8], file: &Path) -> Result<Self> {
        let (graph, metadata) =
            top_level(bytes).map_err(|e| Error::malformed(file, format!("not an ONNX model: {e}")))?;
        let mut graphs = Graphs { file, tensors: Vec::new(), by_name: HashMap::new(), nodes: Vec::new(), count: 0 };
        graphs.read(graph, 0)?;
        let products = graphs.products()?;
        let by_name = graphs.by_name.into_iter().map(|(name, (at, _))| (name, at)).collect();
        Ok(Self { initializers: graphs.tensors, by_name, products, metadata })
    }

    /// All tensors, in the order of the file.
    pub fn initializers(&self) -> &[Initializer] {
        &self.initializers
    }

    /// The tensor of this name, if there is one.
    pub fn initializer(&self, name: &str) -> Option<&Initializer> {
        self.by_name.get(name).map(|&at| &self.initializers[at])
    }

    /// All quantised products, in the order of the file.
    pub fn products(&self) -> &[MatMulNBits] {
        &self.products
    }

    /// Keys and values that whoever wrote the model gave it.
    pub fn metadata(&self) -> &[(String, String)] {
        &self.metadata
    }
}

/// The graph of a `ModelProto`, and its metadata.
fn top_level(bytes: &[u8]) -> proto::Result<(Slice<'_>, Vec<(String, String)>)> {
    let mut graph = None;
    let mut metadata = Vec::new();
    for field in Slice::whole(bytes).fields() {
        let field = field?;
        match field.number {
            7 if graph.replace(field.slice()?).is_some() => return Err("it has two graphs".into()),
            14 => {
                let (key, value) = string_entry(field.slice()?)?;
                metadata.push((key.to_owned(), value.to_owned()));
            }
            _ => {}
        }
    }
    Ok((graph.ok_or("it has no graph")?, metadata))
}

/// A `StringStringEntryProto`.
pub(super) fn string_entry(entry: Slice<'_>) -> proto::Result<(&str, &str)> {
    let (mut key, mut value) = ("", "");
    for field in entry.fields() {
        let field = field?;
        match field.number {
            1 => key = field.text()?,
            2 => value = field.text()?,
            _ => {}
        }
    }
    Ok((key, value))
}

/// The tensors and products of a graph and those within it.
struct Graphs<'a> {
    file: &'a Path,
    tensors: Vec<Initializer>,
    /// Place of a tensor, and number of its graph.
    by_name: HashMap<String, (usize, usize)>,
    nodes: Vec<Node<'a>>,
    count: usize,
}

/// Attributes of `MatMulNBits`, all of them integers.
const ATTRIBUTES: &[&str] = &["N", "K", "block_size", "bits", "accuracy_level", "weight_prepacked"];

/// A node that is a product.
#[derive(Default)]
struct Node<'a> {
    name: &'a str,
    op_type: &'a str,
    domain: &'a str,
    inputs: Vec<&'a str>,
    attributes: Vec<Attribute<'a>>,
}

/// An attribute of a node.
struct Attribute<'a> {
    name: &'a str,
    /// The error says what it is instead of an integer.
    integer: std::result::Result<u64, &'static str>,
}

impl<'a> Attribute<'a> {
    /// Reads an `AttributeProto`; graphs in it go to `graphs`.
    fn parse(proto: Slice<'a>, graphs: &mut Vec<Slice<'a>>) -> proto::Result<Self> {
        const INTEGER: u64 = 2;
        let (mut name, mut value, mut declared, mut held) = ("", 0, 0, INTEGER);
        for field in proto.fields() {
            let field = field?;
            match field.number {
                1 => name = field.text()?,
                3 => value = field.number_value()?,
                20 => declared = field.number_value()?,
                6 | 11 => graphs.push(field.slice()?),
                _ => {}
            }
            // Types are numbered as their fields are, one less; older files do not declare them.
            if let 2 | 4..=11 = field.number {
                held = u64::from(field.number) - 1;
            }
        }
        let integer = match if declared == 0 { held } else { declared } {
            INTEGER => Ok(value),
            1 => Err("a float"),
            3 => Err("a string"),
            6..=8 => Err("a list"),
            _ => Err("another type"),
        };
        Ok(Self { name, integer })
    }
}

impl<'a> Graphs<'a> {
    fn read(&mut self, graph: Slice<'a>, depth: usize) -> Result<()> {
        let malformed = |what: String| Error::malformed(self.file, format!("graph: {what}"));
        if depth == MAX_DEPTH {
            return Err(malformed(format!("expected at most {MAX_DEPTH} graphs, one within the other, got more")));
        }
        let number = self.count;
        self.count += 1;
        for field in graph.fields() {
            let field = field.map_err(malformed)?;
            match field.number {
                1 => self.node(field.slice().map_err(malformed)?, depth)?,
                5 => {
                    let tensor = Initializer::parse(field.slice().map_err(malformed)?, self.file)?;
                    tensor.map_or(Ok(()), |tensor| self.add(tensor, number))?;
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn add(&mut self, tensor: Initializer, graph: usize) -> Result<()> {
        match self.by_name.insert(tensor.name.clone(), (self.tensors.len(), graph)) {
            None => {
                self.tensors.push(tensor);
                Ok(())
            }
            Some((_, other)) if other == graph => {
                Err(Error::malformed(self.file, format!("tensor `{}` appears twice", tensor.name)))
            }
            Some(_) => {
                let what = format!("tensor `{}`: two graphs within the model have one of this name", tensor.name);
                Err(Error::unsupported(self.file, what))
            }
        }
    }

    /// Keeps a node that is a product, and follows the graphs of any other.
    fn node(&mut self, proto: Slice<'a>, depth: usize) -> Result<()> {
        let mut node = Node::default();
        let mut graphs = Vec::new();
        let mut read = |field: Field<'a>| {
            match field.number {
                1 => node.inputs.push(field.text()?),
                3 => node.name = field.text()?,
                4 => node.op_type = field.text()?,
                5 => node.attributes.push(Attribute::parse(field.slice()?, &mut graphs)?),
                7 => node.domain = field.text()?,
                _ => {}
            }
            Ok(())
        };
        let read: proto::Result<()> = proto.fields().try_for_each(|field| read(field?));
        read.map_err(|e| Error::malformed(self.file, format!("node `{}`: {e}", node.name)))?;
        if node.op_type == "MatMulNBits" && node.domain == "com.microsoft" {
            self.nodes.push(node);
        }
        graphs.into_iter().try_for_each(|graph| self.read(graph, depth + 1))
    }

    fn products(&self) -> Result<Vec<MatMulNBits>> {
        let mut products: Vec<MatMulNBits> = Vec::new();
        let mut by_weight: HashMap<String, usize> = HashMap::new();
        for node in &self.nodes {
            let product = self.product(node)?;
            match by_weight.get(&product.weight).map(|&at| &products[at]) {
                None => {
                    by_weight.insert(product.weight.clone(), products.len());
                    products.push(product);
                }
                Some(first) => {
                    let named = |p: &MatMulNBits| MatMulNBits { node: String::new(), accuracy_level: 0, ..p.clone() };
                    if named(first) != named(&product) {
                        let what = format!(
                            "tensor `{}`: the products `{}` and `{}` take it for different weights",
                            product.weight, first.node, product.node
                        );
                        return Err(Error::unsupported(self.file, what));
                    }
                }
            }
        }
        name_modules(&mut products);
        Ok(products)
    }

    fn product(&self, node: &Node<'_>) -> Result<MatMulNBits> {
        let what = |what: String| format!("MatMulNBits node `{}`: {what}", node.name);
        let unsupported = |text: String| Error::unsupported(self.file, what(text));
        let malformed = |text: String| Error::malformed(self.file, what(text));
        let input = |at: usize, role: &str| match node.inputs.get(at).copied().unwrap_or_default() {
            "" => Ok(None),
            name if self.by_name.contains_key(name) => Ok(Some(name.to_owned())),
            name => Err(unsupported(format!("its {role} `{name}` is not an initializer of numbers"))),
        };
        let needed = |at: usize, role: &str| {
            input(at, role)?.ok_or_else(|| malformed(format!("expected {role} as input {at}, got none")))
        };
        if node.inputs.len() > 6 {
            return Err(unsupported(format!("expected at most 6 inputs, got {}", node.inputs.len())));
        }
        let [mut n, mut k, mut block_size] = [None; 3];
        let (mut bits, mut accuracy_level) = (4, 0);
        for &Attribute { name, integer } in &node.attributes {
            let is_known = ATTRIBUTES.contains(&name);
            let value = match integer {
                _ if !is_known => return Err(unsupported(format!("unknown attribute `{name}`"))),
                Ok(value) => value,
                Err(got) => return Err(malformed(format!("expected `{name}` to be an integer, got {got}"))),
            };
            let size = usize::try_from(value as i64).ok().filter(|&size| size > 0);
            let small = u32::try_from(value).ok();
            let (known, expected) = match name {
                "N" => (size.map(|v| n = Some(v)), "at least 1"),
                "K" => (size.map(|v| k = Some(v)), "at least 1"),
                "block_size" => (size.map(|v| block_size = Some(v)), "at least 1"),
                "bits" => (small.map(|v| bits = v), "a small number"),
                "accuracy_level" => (small.map(|v| accuracy_level = v), "a small number"),
                // `weight_prepacked`: layouts of single execution providers, which files are not meant to be exchanged in.
                _ => ((value == 0).then_some(()), "0: other layouts are not read"),
            };
            known.ok_or_else(|| unsupported(format!("expected `{name}` to be {expected}, got {}", value as i64)))?;
        }
        let given =
            |value: Option<usize>, name| value.ok_or_else(|| malformed(format!("it has no attribute `{name}`")));
        let weight = needed(1, "a weight")?;
        Ok(MatMulNBits {
            node: node.name.to_owned(),
            prefix: weight.clone(),
            weight,
            scales: needed(2, "scales")?,
            zero_points: input(3, "zero points")?,
            g_idx: input(4, "g_idx")?,
            bias: input(5, "bias")?,
            n: given(n, "N")?,
            k: given(k, "K")?,
            bits,
            block_size: given(block_size, "block_size")?,
            accuracy_level,
        })
    }
}

/// Gives each product the name of its module; the full name of the weight where the short one is not its own.
fn name_modules(products: &mut [MatMulNBits]) {
    let mut owners: HashMap<&str, usize> = HashMap::new();
    for product in &*products {
        let (short, full) = (module_name(&product.weight), product.weight.as_str());
        *owners.entry(short).or_default() += 1;
        if short != full {
            *owners.entry(full).or_default() += 1;
        }
    }
    let own = |product: &MatMulNBits| owners[module_name(&product.weight)] == 1;
    let short: Vec<bool> = products.iter().map(own).collect();
    for (product, short) in products.iter_mut().zip(short) {
        let name = if short { module_name(&product.weight) } else { &product.weight };
        product.prefix = name.to_owned();
    }
}

/// A weight's name without what quantisers add to it: `_Q4`, `_Q4G128`, then `.weight` or `.qweight`, then `.MatMul` or
/// `.MatMulNBits`.
fn module_name(weight: &str) -> &str {
    let without = |name: &'static [&'static str]| {
        move |text| name.iter().find_map(|ending| str::strip_suffix(text, ending)).unwrap_or(text)
    };
    let mut name = weight;
    if let Some((before, bits)) = weight.rsplit_once("_Q") {
        let (bits, group) = bits.split_once('G').unwrap_or((bits, "0"));
        let digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
        if digits(bits) && digits(group) {
            name = before;
        }
    }
    let name = without(&[".weight", ".qweight"])(name);
    let name = without(&[".MatMul", ".MatMulNBits"])(name);
    if name.is_empty() { weight } else { name }
}
