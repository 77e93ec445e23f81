//! The values of a file's metadata: read with every length checked against the bytes that are left, and written.

/// How deep arrays may lie in arrays.
const DEEPEST: usize = 4;

macro_rules! numbers {
    ($($(#[$doc:meta])* $variant:ident($number:ty) = $id:literal;)*) => {
        /// A value of the metadata.
        #[derive(Clone, Debug, PartialEq)]
        pub enum Value {
            $($(#[$doc])* $variant($number),)*
            /// True or false.
            Bool(bool),
            /// Text.
            String(String),
            /// Values of one type.
            Array(Array),
        }

        /// Values of one type.
        #[derive(Clone, Debug, PartialEq)]
        pub enum Array {
            $($(#[$doc])* $variant(Vec<$number>),)*
            /// True or false.
            Bool(Vec<bool>),
            /// Texts.
            String(Vec<String>),
            /// Arrays.
            Array(Vec<Array>),
        }

        impl Value {
            /// Appends number of the type and value, as files hold them.
            pub(super) fn write(&self, out: &mut Vec<u8>) {
                match self {
                    $(Value::$variant(v) => {
                        out.extend(u32::to_le_bytes($id));
                        out.extend(v.to_le_bytes());
                    })*
                    Value::Bool(v) => {
                        out.extend(u32::to_le_bytes(BOOL));
                        out.push(u8::from(*v));
                    }
                    Value::String(text) => {
                        out.extend(u32::to_le_bytes(STRING));
                        write_string(text, out);
                    }
                    Value::Array(array) => {
                        out.extend(u32::to_le_bytes(ARRAY));
                        array.write(out);
                    }
                }
            }
        }

        impl Array {
            /// Number of values.
            pub fn len(&self) -> usize {
                match self {
                    $(Array::$variant(values) => values.len(),)*
                    Array::Bool(values) => values.len(),
                    Array::String(values) => values.len(),
                    Array::Array(values) => values.len(),
                }
            }

            fn write(&self, out: &mut Vec<u8>) {
                let mut head = |id: u32| {
                    out.extend(id.to_le_bytes());
                    out.extend((self.len() as u64).to_le_bytes());
                };
                match self {
                    $(Array::$variant(values) => {
                        head($id);
                        values.iter().for_each(|v| out.extend(v.to_le_bytes()));
                    })*
                    Array::Bool(values) => {
                        head(BOOL);
                        out.extend(values.iter().map(|&v| u8::from(v)));
                    }
                    Array::String(texts) => {
                        head(STRING);
                        texts.iter().for_each(|text| write_string(text, out));
                    }
                    Array::Array(arrays) => {
                        head(ARRAY);
                        arrays.iter().for_each(|array| array.write(out));
                    }
                }
            }
        }

        impl Cursor<'_> {
            /// A value, its type first.
            pub fn value(&mut self) -> Result<Value, String> {
                Ok(match self.u32()? {
                    $($id => Value::$variant(<$number>::from_le_bytes(self.take()?)),)*
                    BOOL => Value::Bool(self.bool()?),
                    STRING => Value::String(self.string()?.to_owned()),
                    ARRAY => Value::Array(self.array(1)?),
                    other => return Err(format!("expected the number of a value's type, 0 to 12, got {other}")),
                })
            }

            fn array(&mut self, depth: usize) -> Result<Array, String> {
                if depth > DEEPEST {
                    return Err(format!("expected arrays at most {DEEPEST} deep"));
                }
                let kind = self.u32()?;
                let count = self.u64()?;
                Ok(match kind {
                    $($id => {
                        let count = self.count(count, size_of::<$number>(), "numbers")?;
                        let bytes = self.slice(count * size_of::<$number>())?;
                        let (numbers, _) = bytes.as_chunks::<{ size_of::<$number>() }>();
                        Array::$variant(numbers.iter().map(|b| <$number>::from_le_bytes(*b)).collect())
                    })*
                    BOOL => {
                        let count = self.count(count, 1, "booleans")?;
                        Array::Bool((0..count).map(|_| self.bool()).collect::<Result<_, _>>()?)
                    }
                    STRING => {
                        let count = self.count(count, 8, "strings")?;
                        self.owned(count)?;
                        let mut texts = Vec::with_capacity(count);
                        for i in 0..count {
                            texts.push(self.string().map_err(|e| format!("string {i}: {e}"))?.to_owned());
                        }
                        Array::String(texts)
                    }
                    ARRAY => {
                        let count = self.count(count, 12, "arrays")?;
                        self.owned(count)?;
                        let mut arrays = Vec::with_capacity(count);
                        for _ in 0..count {
                            arrays.push(self.array(depth + 1)?);
                        }
                        Array::Array(arrays)
                    }
                    other => return Err(format!("expected the number of an element's type, 0 to 12, got {other}")),
                })
            }
        }
    };
}

const BOOL: u32 = 7;
const STRING: u32 = 8;
const ARRAY: u32 = 9;

numbers! {
    /// Unsigned byte.
    U8(u8) = 0;
    /// Signed byte.
    I8(i8) = 1;
    /// 16-bit unsigned.
    U16(u16) = 2;
    /// 16-bit signed.
    I16(i16) = 3;
    /// 32-bit unsigned.
    U32(u32) = 4;
    /// 32-bit signed.
    I32(i32) = 5;
    /// Single precision.
    F32(f32) = 6;
    /// 64-bit unsigned.
    U64(u64) = 10;
    /// 64-bit signed.
    I64(i64) = 11;
    /// Double precision.
    F64(f64) = 12;
}

impl Value {
    /// The value as a number that is not negative, whatever its integer type.
    pub fn as_u64(&self) -> Option<u64> {
        match *self {
            Value::U8(v) => Some(v.into()),
            Value::U16(v) => Some(v.into()),
            Value::U32(v) => Some(v.into()),
            Value::U64(v) => Some(v),
            Value::I8(v) => v.try_into().ok(),
            Value::I16(v) => v.try_into().ok(),
            Value::I32(v) => v.try_into().ok(),
            Value::I64(v) => v.try_into().ok(),
            _ => None,
        }
    }
}

impl Array {
    /// Whether there is no value.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Appends a text, its length first.
pub(super) fn write_string(text: &str, out: &mut Vec<u8>) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

/// Strings and arrays in arrays that a header may hold in all: each takes more memory than its bytes in the file. The
/// largest vocabularies have half a million with their merges.
const MOST_OWNED: usize = 1 << 21;

/// A place in a file.
pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
    pub at: usize,
    /// Strings and arrays that may still come.
    owned_left: usize,
}

impl<'a> Cursor<'a> {
    /// The beginning of these bytes.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0, owned_left: MOST_OWNED }
    }

    /// Counts strings or arrays that are going to be kept. Error: too many.
    fn owned(&mut self, count: usize) -> Result<(), String> {
        let left = self.owned_left.checked_sub(count);
        self.owned_left = left.ok_or_else(|| format!("expected at most {MOST_OWNED} strings and arrays in all"))?;
        Ok(())
    }

    pub fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    pub fn slice(&mut self, length: usize) -> Result<&'a [u8], String> {
        if length > self.left() {
            return Err(format!(
                "expected {length} bytes at {}, got {}: the file is truncated, or its header too long",
                self.at,
                self.left()
            ));
        }
        let slice = &self.bytes[self.at..self.at + length];
        self.at += length;
        Ok(slice)
    }

    fn take<const N: usize>(&mut self) -> Result<[u8; N], String> {
        self.slice(N).map(|slice| slice.try_into().expect("a slice of N bytes"))
    }

    pub fn u32(&mut self) -> Result<u32, String> {
        self.take().map(u32::from_le_bytes)
    }

    pub fn u64(&mut self) -> Result<u64, String> {
        self.take().map(u64::from_le_bytes)
    }

    fn bool(&mut self) -> Result<bool, String> {
        match self.take()? {
            [0] => Ok(false),
            [1] => Ok(true),
            [other] => Err(format!("expected a boolean, 0 or 1, got {other}")),
        }
    }

    pub fn string(&mut self) -> Result<&'a str, String> {
        let length = self.u64()?;
        let length = self.count(length, 1, "bytes of text")?;
        std::str::from_utf8(self.slice(length)?).map_err(|e| format!("expected text in UTF-8: {e}"))
    }

    /// A count of things that take at least `least` bytes each, if so many may follow.
    pub fn count(&self, count: u64, least: usize, what: &str) -> Result<usize, String> {
        match usize::try_from(count) {
            Ok(count) if count <= self.left() / least => Ok(count),
            _ => {
                let left = self.left();
                Err(format!(
                    "{count} {what} cannot lie in the {left} bytes that are left; the file is truncated, not GGUF, or its header too long"
                ))
            }
        }
    }
}
