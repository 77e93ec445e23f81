//! One initialiser: what `TensorProto` says of a tensor, proven consistent, and where its bytes lie.

use super::element::{self, ElementType};
use super::proto::{Field, Slice};
use crate::error::{Error, Result};
use std::ops::Range;
use std::path::{Component, Path};

/// Dimensions of a tensor; none has more than a few.
const MAX_DIMS: usize = 32;

/// A tensor that a model holds.
#[derive(Clone, Debug, PartialEq)]
pub struct Initializer {
    /// Its name.
    pub name: String,
    /// Type of its elements.
    pub element: &'static ElementType,
    /// Its dimensions, outermost first; none for a single number.
    pub shape: Vec<usize>,
    /// Bytes it takes.
    pub bytes: usize,
    /// Where they are.
    pub place: Place,
}

/// Where the bytes of a tensor are, little-endian, row-major.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// In this range of the model file.
    Inline(Range<usize>),
    /// Here: the file holds the elements one by one, in an encoding of numbers.
    Decoded(Vec<u8>),
    /// In another file, from this byte on.
    External {
        /// The file, relative to the folder of the model; it never leads out of it.
        location: String,
        /// The first byte.
        offset: u64,
    },
}

impl Initializer {
    /// Its bytes in the external file that [`Place::External`] names, whose size is `file_bytes`. Errors: it is not
    /// external; it reaches past the end of the file.
    pub fn external_range(&self, file_bytes: usize, model: &Path) -> Result<Range<usize>> {
        let Place::External { location, offset } = &self.place else {
            let expected = format!("tensor `{}` to be external", self.name);
            return Err(Error::invalid("read external data", expected, "one in the model file"));
        };
        let start = usize::try_from(*offset).ok();
        let range = start.and_then(|start| Some(start..start.checked_add(self.bytes)?));
        range.filter(|range| range.end <= file_bytes).ok_or_else(|| {
            let what = format!(
                "tensor `{}`: its {} bytes from {offset} on reach past the end of {location}, which has {file_bytes}",
                self.name, self.bytes
            );
            Error::malformed(model, what)
        })
    }

    /// Reads a `TensorProto`; None for a tensor of strings.
    pub(super) fn parse(proto: Slice<'_>, file: &Path) -> Result<Option<Self>> {
        // The name comes after the fields that may be wrong, and their errors need it.
        let name = name_of(proto).map_err(|e| Error::malformed(file, format!("an initializer: {e}")))?;
        Fields::read(proto, name, file)?.check()
    }
}

fn name_of(proto: Slice<'_>) -> super::proto::Result<&str> {
    let mut name = "";
    for field in proto.fields() {
        let field = field?;
        if field.number == 8 {
            name = field.text()?;
        }
    }
    if name.is_empty() { Err("it has no name".into()) } else { Ok(name) }
}

/// The fields of a `TensorProto` as they stand.
struct Fields<'a> {
    file: &'a Path,
    name: &'a str,
    dims: Vec<u64>,
    data_type: u64,
    raw: Option<Slice<'a>>,
    /// Elements one by one.
    typed: Vec<Field<'a>>,
    external: Vec<Slice<'a>>,
    is_external: bool,
}

impl<'a> Fields<'a> {
    fn read(proto: Slice<'a>, name: &'a str, file: &'a Path) -> Result<Self> {
        let (dims, typed, external) = (Vec::new(), Vec::new(), Vec::new());
        let mut this = Self { file, name, dims, data_type: 0, raw: None, typed, external, is_external: false };
        let mut segmented = false;
        let mut read = |field: Field<'a>| {
            match field.number {
                1 => field.for_each_number(|d| {
                    // One too many is kept, so that it shows.
                    if this.dims.len() <= MAX_DIMS {
                        this.dims.push(d);
                    }
                })?,
                2 => this.data_type = field.number_value()?,
                3 => segmented = true,
                element::FLOAT_DATA
                | element::INT32_DATA
                | element::INT64_DATA
                | element::DOUBLE_DATA
                | element::UINT64_DATA => this.typed.push(field),
                9 => this.raw = Some(field.slice()?),
                13 => this.external.push(field.slice()?),
                14 => this.is_external = field.number_value()? == 1,
                _ => {}
            }
            Ok(())
        };
        let read: super::proto::Result<()> = proto.fields().try_for_each(|field| read(field?));
        read.map_err(|e| this.malformed(e))?;
        if segmented {
            return Err(Error::unsupported(file, format!("tensor `{name}`: it is stored in segments")));
        }
        Ok(this)
    }

    fn malformed(&self, what: impl std::fmt::Display) -> Error {
        Error::malformed(self.file, format!("tensor `{}`: {what}", self.name))
    }

    fn check(self) -> Result<Option<Initializer>> {
        if self.data_type == element::STRING {
            return Ok(None);
        }
        let Some(element) = ElementType::from_number(self.data_type) else {
            let what = format!("tensor `{}`: unknown element type {}", self.name, self.data_type);
            return Err(Error::unsupported(self.file, what));
        };
        if self.dims.len() > MAX_DIMS {
            let what = format!("tensor `{}`: expected at most {MAX_DIMS} dimensions, got more", self.name);
            return Err(Error::unsupported(self.file, what));
        }
        let dims: Vec<i64> = self.dims.iter().map(|&d| d as i64).collect();
        let shape: Option<Vec<usize>> = dims.iter().map(|&d| usize::try_from(d).ok()).collect();
        let bytes = shape.as_ref().and_then(|shape| element.bytes_of(shape));
        let (Some(shape), Some(bytes)) = (shape, bytes) else {
            return Err(self.malformed(format!("shape {dims:?} of {element} is negative or overflows")));
        };
        let place = self.place(element, bytes)?;
        let (got, what) = match &place {
            Place::Inline(range) => (range.len(), "bytes"),
            Place::Decoded(decoded) => (decoded.len(), "bytes of elements"),
            Place::External { .. } => (bytes, "bytes"),
        };
        if got != bytes {
            return Err(self.malformed(format!("expected {bytes} {what} for shape {shape:?} of {element}, got {got}")));
        }
        Ok(Some(Initializer { name: self.name.to_owned(), element, shape, bytes, place }))
    }

    fn place(&self, element: &ElementType, bytes: usize) -> Result<Place> {
        if self.is_external {
            if self.raw.is_some() || !self.typed.is_empty() {
                return Err(self.malformed("expected its data either here or in an external file, got both"));
            }
            return self.external(bytes);
        }
        match (self.raw, self.typed.as_slice()) {
            (Some(raw), []) => Ok(Place::Inline(raw.range())),
            (None, []) => Ok(Place::Inline(0..0)),
            (None, typed) => self.decode(element, typed, bytes).map_err(|e| self.malformed(e)),
            (Some(_), _) => Err(self.malformed("expected its data either as raw bytes or as elements, got both")),
        }
    }

    /// Elements that are stored one by one.
    fn decode(&self, element: &ElementType, typed: &[Field<'a>], bytes: usize) -> super::proto::Result<Place> {
        if let Some(other) = typed.iter().find(|field| field.number != element.typed_field) {
            return Err(format!(
                "elements of {element} stand in field {}, got field {}",
                element.typed_field, other.number
            ));
        }
        let fixed = match element.typed_field {
            element::FLOAT_DATA => Some(4),
            element::DOUBLE_DATA => Some(8),
            _ => None,
        };
        let mut decoded = Vec::new();
        if let Some(size) = fixed {
            if let [only] = typed {
                return Ok(Place::Inline(only.fixed(size)?.range()));
            }
            for field in typed {
                decoded.extend_from_slice(field.fixed(size)?.bytes());
            }
            return Ok(Place::Decoded(decoded));
        }
        // Elements narrower than a byte are stored a byte at a time.
        let width = element.bits.div_ceil(8);
        let mut beyond = None;
        for field in typed {
            field.for_each_number(|number| {
                // A byte too many is kept, so that a surplus shows; what comes after it is not.
                if decoded.len() <= bytes {
                    let fits = width == 8 || {
                        let (signed, half) = (number as i64, 1i64 << (8 * width - 1));
                        (-half..2 * half).contains(&signed)
                    };
                    if !fits {
                        beyond.get_or_insert(number as i64);
                    }
                    decoded.extend_from_slice(&number.to_le_bytes()[..width]);
                }
            })?;
        }
        match beyond {
            Some(number) => Err(format!("{number} is beyond the range of {element}")),
            None => Ok(Place::Decoded(decoded)),
        }
    }

    /// The file and offset that the entries of an external tensor give.
    fn external(&self, bytes: usize) -> Result<Place> {
        let (mut location, mut offset, mut length, mut checksum, mut base) = (None, None, None, None, None);
        for &entry in &self.external {
            let (key, value) = super::model::string_entry(entry).map_err(|e| self.malformed(e))?;
            let repeated = match key {
                "location" => location.replace(value).is_some(),
                "offset" => offset.replace(value).is_some(),
                "length" => length.replace(value).is_some(),
                "checksum" => checksum.replace(value).is_some(),
                // Where the model lay when it was written: onnx writes it, and its readers go by where the model lies.
                "basepath" => base.replace(value).is_some(),
                other => {
                    let known = "location, offset, length, checksum or basepath";
                    return Err(self.malformed(format!("expected of its external data {known}, got {other:?}")));
                }
            };
            if repeated {
                return Err(self.malformed(format!("its external `{key}` appears twice")));
            }
        }
        let number = |key: &str, value: Option<&str>| {
            value.map(|value| value.parse::<u64>()).transpose().map_err(|_| {
                let value = value.unwrap_or_default().escape_debug();
                self.malformed(format!("expected its external `{key}` to be a number, got \"{value}\""))
            })
        };
        let (offset, length) = (number("offset", offset)?, number("length", length)?);
        let Some(location) = location else {
            return Err(self.malformed("its data are external, but no `location` says where"));
        };
        let path = Path::new(location);
        let inside = path.components().all(|part| matches!(part, Component::Normal(_) | Component::CurDir));
        if path.file_name().is_none() || !inside || location.contains(['\\', '\0']) {
            let location = location.escape_debug();
            return Err(self.malformed(format!("expected an external file in the model's folder, got \"{location}\"")));
        }
        if let Some(length) = length.filter(|&length| length != bytes as u64) {
            return Err(self.malformed(format!("expected an external length of {bytes} for its shape, got {length}")));
        }
        Ok(Place::External { location: location.to_owned(), offset: offset.unwrap_or(0) })
    }
}
